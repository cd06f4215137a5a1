# Two environments: .venv has what training and serving need, .venv-test has torch, Triton and the checkers too.
PYTHON ?= python3
TORCH ?= torch==2.13.0
TRITON ?= triton==3.8.0
TEST_PYTHON = .venv-test/bin/python

.DEFAULT_GOAL := help
.PHONY: help run test check format gpu-test soak load env test-env clean

help:
	@echo 'make run       train on the shipped profile, print two decisions, start the service (Ctrl-C ends it; RUN_ONCE=1 ends by itself)'
	@echo '               on port 8000, or another where that is taken; PORT=8123 for that one and no other'
	@echo 'make test      all tests, with $(TORCH) and $(TRITON)'
	@echo '               others:  make test TRITON="triton==3.6.0 numpy<2.4"'
	@echo '               some:    make test ARGS="tests/test_packaging.py -x"'
	@echo '               PyPI has torch with CUDA, some gigabytes; for a small CPU build point PIP_EXTRA_INDEX_URL at'
	@echo '               the wheel index that pytorch.org names for CPU, and take TORCH=torch==2.13.0+cpu'
	@echo 'make check     ruff, mypy --strict, and whether the committed GPU results are of these kernels'
	@echo 'make format    let ruff format and fix the code'
	@echo 'make gpu-test  the tests that need a GPU, with the torch, Triton and pytest of $(PYTHON) (works offline); OUT=FOLDER'
	@echo 'make soak      kill the service over and over, and feed it made-up files and requests; ARGS="--kills 10 --inputs 2000"'
	@echo 'make load      latency of the service while it retrains and takes an upload; fails where a target is missed'
	@echo 'make clean     remove the environments and caches'
	@echo 'PYTHON=...     another Python, 3.10 or newer (now: $(PYTHON))'

env:
	@$(PYTHON) scripts/setup_env.py .venv -e '.[train,server]'

test-env:
	@$(PYTHON) scripts/setup_env.py .venv-test -e '.[train,server,postgresql,collect,plot,test,check]' $(foreach r,$(TORCH) $(TRITON),'$(r)')

run: env
	@.venv/bin/python scripts/run.py

test: test-env
	@echo 'Testing with $(TORCH) and $(TRITON); for others: make test TORCH=... TRITON=... (see make help)'
	@$(TEST_PYTHON) scripts/run_tests.py $(ARGS)

check: test-env
	$(TEST_PYTHON) -m ruff check .
	$(TEST_PYTHON) -m ruff format --check .
	scripts/check_types.sh $(TEST_PYTHON)
	$(TEST_PYTHON) scripts/gpu_test.py --check
	$(TEST_PYTHON) scripts/docs_tables.py --check

format: test-env
	$(TEST_PYTHON) -m ruff check --fix .
	$(TEST_PYTHON) -m ruff format .

gpu-test:
	$(PYTHON) scripts/gpu_test.py $(if $(OUT),--out '$(OUT)')

soak: test-env
	@$(TEST_PYTHON) scripts/soak.py $(ARGS)

load: test-env
	@$(TEST_PYTHON) benchmarks/load.py $(ARGS)

clean:
	rm -rf .venv .venv-test build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
