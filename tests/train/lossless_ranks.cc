// SPDX-License-Identifier: Apache-2.0
// A rank of tests/lossless.h as a process: `lossless_ranks FILE` trains, and rank 0 writes what came out.
#include <ATen/Parallel.h>

#include "lockstep/base/text.h"
#include "lockstep/checkpoint.h"
#include "lockstep/world.h"
#include "tests/lossless.h"

int main(int, char** argv) {
  at::set_num_threads(1);
  lockstep::World world = lockstep::World::from_env();
  lockstep::TensorFile file;
  for (const auto& [name, tensors] : lockstep::testing::lossless_courses(world))
    for (size_t i = 0; i < tensors.size(); ++i) file.tensors[lockstep::concat(name, "/", i)] = tensors[i];
  if (world.rank() == 0) lockstep::save_safetensors(argv[1], file);
  world.barrier();
}
