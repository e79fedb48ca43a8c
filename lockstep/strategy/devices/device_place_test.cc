// SPDX-License-Identifier: Apache-2.0
#include "lockstep/device_place.h"

#include "lockstep/collective/gpus.h"
#include "lockstep/error.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::message_of;

TEST(DevicePlace, is_read_from_a_list_of_gpus_or_cores) {
  const auto gpus = parse_device_places("cuda:0,cuda:1,cuda:0");
  EXPECT_EQ(gpus.size(), 3U);
  EXPECT_EQ(gpus[1].device, torch::Device("cuda:1"));
  EXPECT_EQ(names_of(gpus), (std::vector<std::string>{"cuda:0", "cuda:1", "cuda:0 (device 2)"}));
  const auto cores = parse_device_places("cpu:0-3,cpu:6");
  EXPECT_EQ(cores[0].cores, (CoreSet{0, 1, 2, 3}));
  EXPECT_EQ(cores[1].cores, CoreSet{6});
  EXPECT_EQ(names_of(cores), (std::vector<std::string>{"cpu:0", "cpu:1"}));
}

TEST(DevicePlace, says_what_names_no_device) {
  for (const char* text : {"cuda:x", "cuda:-1", "gpu:0", "cpu:3-1", "cpu:", "cuda:0,", "cpu:1-2-3"})
    EXPECT_TRUE(contains(message_of<UsageError>([&] { parse_device_places(text); }), "names no device")) << text;
  EXPECT_TRUE(contains(message_of<UsageError>([] { parse_device_places("cuda:0,cpu:0"); }), "GPUs beside cores"));
}

TEST(DevicePlace, refuses_a_gpu_that_does_not_exist) {
  const int gpus = cuda_device_count();
  EXPECT_EQ(cuda_device_count_before_fork(), gpus);
  EXPECT_THROW(even_places(torch::kCUDA, gpus + 1), DeviceError);
  EXPECT_EQ(even_places(torch::kCPU, 3), std::vector<DevicePlace>(3));
}

}  // namespace
}  // namespace lockstep
