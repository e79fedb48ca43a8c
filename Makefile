# Two commands are all a newcomer needs: `make demo` and `make test`.
JOBS ?= $(shell nproc)
demo_options = --model lenet --data fashion-mnist --strategy ddp --ranks auto --epochs 5 --batch-size 256 \
               --lr 0.1 --momentum 0.9 --nesterov --schedule cosine --warmup-epochs 0.5

.PHONY: demo test soak cuda bench release format clean

demo: setup-demo release  ## trains LeNet on Fashion-MNIST on every core
	build/release/bin/lockstep train $(demo_options)

test: setup-test  ## builds and runs the tests: release, and ThreadSanitizer on what has no torch
	cmake --preset tsan
	cmake --build --preset tsan -j $(JOBS)
	ctest --preset tsan -j $(JOBS)
	cmake --preset release
	cmake --build --preset release -j $(JOBS)
	ctest --preset release -j $(JOBS)

release:
	cmake --preset release -DLOCKSTEP_TESTS=OFF -DLOCKSTEP_BENCH=OFF
	cmake --build --preset release -j $(JOBS)

setup-%:
	tools/setup.sh $*

clean:
	rm -rf build
