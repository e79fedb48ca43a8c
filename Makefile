# SPDX-License-Identifier: Apache-2.0
# Two commands are all a newcomer needs: `make demo` and `make test`. `make help` lists the rest. TORCH=2.11.0 behind one takes
# another release of torch than the newest.
JOBS ?= $(shell nproc)
demo_options = --model lenet --data fashion-mnist --strategy ddp --ranks auto --epochs 5 --batch-size 256 \
               --lr 0.1 --momentum 0.9 --nesterov --schedule cosine --warmup-epochs 0.5

# Set-up, build and test take turns, also under make -j.
.NOTPARALLEL:

wheel_path = PYTHONPATH=$(CURDIR)/.deps/wheel-tools PATH=$(CURDIR)/.deps/wheel-tools/bin:$$PATH

.PHONY: help demo wheel sdist deb packaged docs plots hops test check versions frameworks cuda bench bench-hosts bench-recovery format clean

help:  ## lists these commands
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1\t/p' Makefile | expand -t 20

demo: setup-demo  ## builds lockstep and trains LeNet on Fashion-MNIST on all cores, 5 epochs
	cmake --preset release -DLOCKSTEP_TESTS=OFF -DLOCKSTEP_BENCH=OFF
	cmake --build --preset release -j $(JOBS)
	build/release/bin/lockstep train $(demo_options)

# TORCH="2.11.0 2.15.0" PYTHONS="python3.11;python3.13": for these releases of both, and not only for those at hand.
wheel:  ## packs the release build as a wheel in dist/ (pip install dist/*.whl)
	rm -rf build/wheel dist/*.whl build/release/.skbuild-info.json  # with it, new tools would configure and compile anew
	for release in $(or $(TORCH),""); do \
	  export TORCH=$$release && tools/setup.sh wheel && $(MAKE) packaged TORCH=$$release && \
	  $(wheel_path) python3 -m pip wheel --quiet --no-deps --no-build-isolation --config-settings=build-dir=build/release \
	    --wheel-dir build/wheel/parts/"$$release" . || exit; done
	$(wheel_path) tools/one_wheel.py build/wheel $$(find build/wheel/parts -name '*.whl')
	$(wheel_path) auditwheel repair --wheel-dir dist --exclude 'libtorch*.so' --exclude 'libc10*.so' \
	  --exclude libgomp.so.1 build/wheel/*.whl
	ls dist/*.whl

sdist: setup-wheel  ## packs what is compiled as a source package in dist/
	rm -f dist/*.tar.gz
	PYTHONPATH=.deps/wheel-tools python3 -c "from scikit_build_core.build import build_sdist; print(build_sdist('dist'))"

deb: setup-wheel packaged  ## packs command, library and headers as a Debian package in dist/
	rm -rf dist/*.deb
	cd build/release && cpack
	ls dist/*.deb

packaged:
	cmake --preset release -DLOCKSTEP_PYTHONS="$(PYTHONS)"
	cmake --build --preset release --target packaged -j $(JOBS)

docs: export PYTHONPATH = $(CURDIR)/.deps/docs-tools
docs: setup-docs  ## makes the documentation as a site in build/docs/html/
	rm -rf build/docs docs/api
	python3 -m sphinx --quiet --fail-on-warning --jobs auto -d build/docs/doctrees -c docs/site . build/docs/html

plots: setup-docs  ## draws README's and docs' plots; COMPARISONS="FOLDER..." those of `lockstep compare`, and copies their tables
	cmake --preset release
	cmake --build --preset release --target lockstep_command -j $(JOBS)
	docs/site/plots.py build/release/bin/lockstep $(COMPARISONS)

hops: setup-test  ## shows the functions that a step and an all-reduce enter, and checks the walks in HACKING.md
	cmake --preset hops
	cmake --build --preset hops -j $(JOBS)
	tests/hops.py --check HACKING.md

# One more at a time than there are cores: many tests wait for others.
test: setup-test  ## builds and runs what every change has to pass; the rest is `make check`
	cmake --preset release -DLOCKSTEP_TESTS=ON
	cmake --build --preset release --target quick_tests -j $(JOBS)
	$(call run_tests,release,test,-LE check -j $$(expr $(JOBS) + 1))

check: setup-check test-tsan wheel deb  ## the rest: wheel, users' projects, hosts, MPI, Slurm, browsers, ThreadSanitizer
	cmake --preset release -DLOCKSTEP_TESTS=ON -DLOCKSTEP_BENCH=ON
	cmake --build --preset release -j $(JOBS)
	$(call run_tests,release,check,-L check)

versions:  ## `make test` with older releases of torch, each in a fresh clone: an hour
	tests/versions.sh 2.11.0 2.13.0 2.14.1

frameworks: setup-check  ## all programs of python/tests/programs/, over lockstep and over Gloo: ten minutes
	cmake --preset release
	cmake --build --preset release -j $(JOBS) --target packaged
	python3 tests/python_test.py build/release stage
	LOCKSTEP_ALL_PROGRAMS=1 python3 tests/python_test.py build/release test_public_programs

# Before a release, and when concurrent code changes: each part takes at most an hour on two cores. docs/design/tested.md
# keeps what was run when.
soak-1: setup-check test-tsan-torch  ## ThreadSanitizer over collectives, gradients and strategies

soak-2: build-asan  ## AddressSanitizer and UBSan over the tests of `make test`
	$(call run_tests,asan,soak-2,-LE check)

soak-3: build-asan  ## the same over those of `make check`
	$(call run_tests,asan,soak-3,-L check)

soak-4: export LOCKSTEP_FAULT_ROUNDS = 200
soak-4: export LOCKSTEP_KILLS = 200
soak-4: export LOCKSTEP_KILL_ROUNDS = 20
soak-4: export LOCKSTEP_STRESS_CALLS = 10000
soak-4: build-release  ## many more ranks killed, at random and at every kind of place
	$(call run_tests,release,soak-4,-R '^(shm|recovery|step.killed|command.surviving_loop)')

soak-5: export LOCKSTEP_FUZZ_ROUNDS = 20000
soak-5: export LOCKSTEP_FUZZ_PAIRS = 1
soak-5: export LOCKSTEP_STORE_FUZZ = 20000
soak-5: export LOCKSTEP_SECURITY_FUZZ = 50000
soak-5: build-release  ## 20,000 random programs, and many more damaged files and messages
	$(call run_tests,release,soak-5,-R '^(step_fuzz|data|checkpoint|collective|hosts.fuzz)')

soak-6: export LOCKSTEP_WHOLE_EXPERIMENTS = 1
soak-6: export LOCKSTEP_ASYNC_EPOCHS = 2
soak-6: build-release  ## whole comparisons of strategies, and asynchronous workers for longer
	$(call run_tests,release,soak-6,-R '^(command.compare|command.check)')

cuda: export PYTHONPATH = $(CURDIR)/.deps/pytorch:$(CURDIR)/.deps/torchvision
cuda: setup-pytorch  ## builds with NCCL and CUDA tensors; if there is a GPU, runs the tests and compares a step with PyTorch's
	cmake --preset cuda
	cmake --build --preset cuda -j $(JOBS)
	if ls /dev/nvidia[0-9]* > /dev/null 2>&1; then ctest --preset cuda && build/cuda/bin/lockstep bench step --device cuda --ranks 1; \
	else echo "no GPU here: compiled and linked, not run"; fi

bench: export PYTHONPATH = $(CURDIR)/.deps/pytorch:$(CURDIR)/.deps/torchvision
bench: setup-pytorch  ## measures lockstep beside PyTorch (downloads 4.7 GB the first time)
	cmake --preset release -DLOCKSTEP_BENCH=ON
	cmake --build --preset release -j $(JOBS)
	build/release/bin/lockstep bench collectives --json bench/results/collectives.json
	build/release/bin/lockstep bench step --json bench/results/step.json
	bench/startup.py
	bench/lenet.py
	build/release/bin/lockstep bench data --json bench/results/data.json

bench-hosts: setup-bench  ## as root: measures several machines, simulated by network namespaces with slow links
	cmake --preset release -DLOCKSTEP_BENCH=ON
	cmake --build --preset release -j $(JOBS)
	build/release/bin/lockstep bench hosts --json bench/results/hosts.json
	build/release/bin/lockstep compare server-vs-ring --links shaped --output build/server-vs-ring

bench-recovery: setup-recovery  ## measures how long a job stands still when a rank is killed, beside torchrun and torchft
	cmake --preset release
	cmake --build --preset release --target lockstep_command lockstep_train -j $(JOBS)
	bench/recovery.py

# Runs the tests of the preset $(1) that ctest's options $(3) choose; their log is called $(2).
run_tests = ctest --preset $(1) -j $(JOBS) $(3); code=$$?; cp build/$(1)/Testing/Temporary/LastTest.log build/$(1)/$(2).log; \
  tests/summary.py build/$(1)/$(2).log; exit $$code

build-%: setup-check
	cmake --preset $* -DLOCKSTEP_TESTS=ON $(if $(filter release,$*),-DLOCKSTEP_BENCH=ON)
	cmake --build --preset $* -j $(JOBS)

test-%: build-%
	$(call run_tests,$*,test)

setup-%:
	tools/setup.sh $*

format:  ## formats the sources with clang-format
	git ls-files '*.h' '*.cc' | xargs clang-format -i

clean:  ## removes every build
	rm -rf build docs/api
