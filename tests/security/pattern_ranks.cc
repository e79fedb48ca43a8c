// SPDX-License-Identifier: Apache-2.0
// Ranks that exchange an array of one pattern until a file is there: what tensors_test.sh looks for on the link, and
// attacks meanwhile.
//
//   pattern_ranks BEGUN END     rank 0 makes BEGUN after the first exchange, and looks for END
#include <filesystem>
#include <fstream>
#include <iostream>

#include <ATen/ops/full.h>

#include "lockstep/world.h"

namespace {

constexpr int32_t kPattern = 0x0ddba11c;
constexpr int64_t kElements = 1 << 20;

}  // namespace

int main(int, char** arguments) {
  lockstep::World world = lockstep::World::from_env();
  const at::Tensor array = at::full({kElements}, kPattern, at::kInt);
  for (bool ended = false; !ended;) {
    array[0] = world.rank() == 0 && std::filesystem::exists(arguments[2]) ? kPattern + 1 : kPattern;
    world.all_reduce(array, lockstep::ReduceOp::kMax);
    if (!array.slice(0, 1).eq(kPattern).all().item<bool>()) {
      std::cerr << "the array has changed" << std::endl;
      return 1;
    }
    ended = array[0].item<int32_t>() != kPattern;
    if (world.rank() == 0) std::ofstream{arguments[1]};
  }
  return 0;
}
