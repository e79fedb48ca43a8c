// SPDX-License-Identifier: Apache-2.0
// The smallest job there is: connect, all-reduce one tensor, say so. bench/startup.py measures how long that takes.
#include <iostream>

#include "lockstep/world.h"

int main() {
  const auto world = lockstep::World::from_env();
  const torch::Tensor tensor = torch::ones({1024});
  world.all_reduce(tensor);
  if (world.rank() == 0) std::cout << "reduced " << tensor[0].item<float>() << std::endl;
}
