"""The pages of Spark's drivers, made from what their control services tell."""
