"""The workers of spark_pipeline.py.  `upper` needs PyArrow, without which the suite must list its parts."""

from spark_pipeline import count_letters, upper_case

from zmdp.workers import Worker

letters = Worker("letters", count_letters)
upper = Worker("upper", upper_case, codec="arrow")
