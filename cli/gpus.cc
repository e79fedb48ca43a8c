// SPDX-License-Identifier: Apache-2.0
// lockstep-gpus: the GPUs that `lockstep env` lists, with their memory and which of the others each one reaches directly.
#include <iostream>

#include "lockstep/base/guarded.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/gpus.h"

namespace lockstep {
namespace {

std::string reached_from(torch::Device gpu, int count) {
  std::vector<std::string> names;
  for (int other = 0; other < count; ++other) {
    const torch::Device peer(torch::kCUDA, static_cast<c10::DeviceIndex>(other));
    if (peer != gpu && gpu_reaches(gpu, peer)) names.push_back(peer.str());
  }
  return names.empty() ? "copies to others go over the host" : concat("reaches ", join(names, " "));
}

int list_gpus() {
  const int count = cuda_device_count();
  for (int i = 0; i < count; ++i) {
    const torch::Device gpu(torch::kCUDA, static_cast<c10::DeviceIndex>(i));
    const auto [free, all] = memory_of(gpu);
    std::cout << gpu.str() << "  " << human_bytes(free) << " free of " << human_bytes(all) << ", "
              << reached_from(gpu, count) << '\n';
  }
  return 0;
}

}  // namespace
}  // namespace lockstep

int main() { return lockstep::guarded(lockstep::list_gpus); }
