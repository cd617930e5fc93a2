"""Python imports this at the start of each process whose PYTHONPATH names this folder."""

from tests.mutants.plant import plant_here

plant_here()
