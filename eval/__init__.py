"""The evaluation: benchmarks, statistics, report and the runner. `python -m eval.run --config recipes/NAME.yaml`."""
