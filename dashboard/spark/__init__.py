"""The pages of Spark's drivers, made from the answers of their control services."""
