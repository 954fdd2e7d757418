"""What our code does to Spark's Python workers."""

import subprocess
import sys


def test_imports_are_exempt_from_collection_but_later_objects_are_not():
    code = """
import gc, weakref
from zmdp.spark.python import exempt_imports_from_collection as exempt
exempt()
frozen = gc.get_freeze_count()
class Cycle: pass
cycle = Cycle(); cycle.itself = cycle; seen = weakref.ref(cycle); del cycle
exempt()
gc.collect()
print(frozen > 1000, gc.get_freeze_count() <= frozen, seen() is None)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True"] * 3
