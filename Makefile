.PHONY: check lint test quickstart clean

check:            ## formatting, types, import contracts and all tests (sets everything up itself)
	./scripts/test.sh

lint:             ## the checks without the tests
	./scripts/test.sh --lint

test: check

quickstart:       ## train a small model on text found on this machine
	./scripts/quickstart.sh

clean:            ## caches and build products; .venv and runs/ stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find megatron_lite tools tests -name __pycache__ -type d -prune -exec rm -rf {} +
