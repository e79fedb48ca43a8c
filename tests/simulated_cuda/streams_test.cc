// SPDX-License-Identifier: Apache-2.0
// Missing waits between streams, threads and the host are found whatever the timing; waits that are there are enough.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <thread>

#include "tests/simulated_cuda/four_gpus.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using lockstep::testing::contains;
using torch::Tensor;

class SimulatedStreams : public ::testing::Test {
 protected:
  void TearDown() override {
    for (int i = 0; i < 4; ++i) gpus().synchronizeDevice(gpu(i).index());
    simulated_cuda_clear_races();
  }

  const c10::Stream side_ = gpus().getNewStream(gpu(0));
  const c10::Stream main_ = gpus().getDefaultStream(gpu(0));
};

void wait_for(const c10::Stream& first, const c10::Stream& then) {
  c10::Event event(torch::kCUDA);
  event.record(first);
  event.block(then);
}

// The text of the race in `body`.
std::string race_in(const std::function<void()>& body) {
  EXPECT_THROW(body(), c10::Error);
  EXPECT_EQ(simulated_cuda_races(), 1);
  return last_race();
}

TEST_F(SimulatedStreams, miss_a_wait_after_a_copy_to_the_device) {
  const Tensor host = torch::ones({1000}).pin_memory();
  Tensor there;
  {
    const c10::StreamGuard guard(side_);
    there = host.to(gpu(0), true);
  }
  const std::string race = race_in([&] { (void)there.sum(); });
  EXPECT_TRUE(contains(race, "aten::sum"));
  EXPECT_TRUE(contains(race, "the copy of [1000] from cpu to cuda:0"));
}

TEST_F(SimulatedStreams, wait_after_a_copy_to_the_device) {
  const Tensor host = torch::ones({1000}).pin_memory();
  Tensor there;
  {
    const c10::StreamGuard guard(side_);
    there = host.to(gpu(0), true);
  }
  wait_for(side_, main_);
  EXPECT_EQ(there.sum().item<float>(), 1000);
  there.record_stream(main_);
  EXPECT_EQ(simulated_cuda_races(), 0);
}

TEST_F(SimulatedStreams, miss_a_wait_after_an_operator) {
  const Tensor there = torch::ones({10}, gpu(0));
  const Tensor doubled = there * 2;
  const c10::StreamGuard guard(side_);
  const std::string race = race_in([&] { (void)doubled.exp(); });
  EXPECT_TRUE(contains(race, "aten::exp"));
  EXPECT_TRUE(contains(race, "aten::mul"));
}

TEST_F(SimulatedStreams, miss_a_wait_before_memory_is_written_that_another_reads) {
  Tensor there = torch::ones({10}, gpu(0));
  wait_for(main_, side_);
  {
    const c10::StreamGuard guard(side_);
    (void)there.exp();
  }
  EXPECT_TRUE(contains(race_in([&] { there.zero_(); }), "aten::exp"));
}

TEST_F(SimulatedStreams, may_write_different_parts_of_one_block) {
  Tensor block = torch::zeros({100}, gpu(0));
  wait_for(main_, side_);
  {
    const c10::StreamGuard guard(side_);
    block.slice(0, 0, 50).add_(1);
  }
  block.slice(0, 50).add_(2);
  EXPECT_EQ(simulated_cuda_races(), 0);
  EXPECT_TRUE(contains(race_in([&] { block.slice(0, 49).add_(1); }), "aten::add"));
}

TEST_F(SimulatedStreams, give_the_host_NaN_before_it_waits_for_a_copy) {
  const Tensor there = torch::ones({100}, gpu(0));
  const Tensor host = torch::zeros({100}).pin_memory();
  host.copy_(there, true);
  EXPECT_TRUE(std::isnan(host.const_data_ptr<float>()[99]));
  gpus().synchronizeStream(main_);
  EXPECT_EQ(host.const_data_ptr<float>()[99], 1);
  EXPECT_EQ(host.sum().item<float>(), 100);
  EXPECT_EQ(simulated_cuda_races(), 0);
}

TEST_F(SimulatedStreams, miss_a_wait_before_the_host_looks_at_a_copy) {
  const Tensor there = torch::ones({100}, gpu(0));
  const Tensor host = torch::zeros({100}).pin_memory();
  host.copy_(there, true);
  (void)host.sum();
  EXPECT_TRUE(contains(last_race(), "aten::sum on the host"));
  EXPECT_TRUE(contains(last_race(), "the copy of [100] from cuda:0 to cpu"));
  EXPECT_THROW(gpus().synchronizeStream(main_), c10::Error);
}

TEST_F(SimulatedStreams, miss_a_wait_before_the_host_writes_to_the_source_of_a_copy) {
  const Tensor host = torch::zeros({100}).pin_memory();
  const Tensor there = host.to(gpu(0), true);
  host.fill_(3);
  EXPECT_TRUE(contains(race_in([&] { gpus().synchronizeStream(main_); }), "wrote to the source of the copy of [100]"));
}

TEST_F(SimulatedStreams, carry_a_copy_from_pinned_memory_to_the_next_device) {
  const Tensor host = torch::zeros({100}).pin_memory();
  const Tensor from = torch::ones({100}, gpu(1));
  host.copy_(from, true);
  const Tensor unordered = torch::empty({100}, gpu(0));
  EXPECT_TRUE(contains(race_in([&] { unordered.copy_(host, true); }), "from cuda:1 to cpu"));
  wait_for(gpus().getDefaultStream(gpu(1)), main_);
  EXPECT_EQ(host.to(gpu(0), true).sum().item<float>(), 100);
}

TEST_F(SimulatedStreams, of_two_threads_need_an_event) {
  Tensor there;
  c10::Event ready(torch::kCUDA);
  std::thread([&] {
    const c10::StreamGuard guard(gpus().getNewStream(gpu(0)));
    there = torch::ones({10}, gpu(0)) * 3;
    ready.record(gpus().getStream(gpu(0)));
  }).join();
  EXPECT_TRUE(contains(race_in([&] { (void)there.exp(); }), "aten::mul"));
  ready.block(main_);
  EXPECT_EQ(there.sum().item<float>(), 30);
}

TEST_F(SimulatedStreams, of_two_devices_are_ordered_by_a_copy_between_them) {
  const Tensor one = torch::ones({10}, gpu(0));
  const Tensor other = one.to(gpu(1)) + 1;
  EXPECT_EQ(other.to(gpu(0)).sum().item<float>(), 20);
  EXPECT_EQ(simulated_cuda_races(), 0);
}

TEST_F(SimulatedStreams, are_ordered_by_a_wait_of_the_host) {
  const Tensor doubled = torch::ones({10}, gpu(0)) * 2;
  gpus().synchronizeStream(main_);
  const c10::StreamGuard guard(side_);
  EXPECT_EQ(doubled.sum().item<float>(), 20);
}

TEST_F(SimulatedStreams, find_memory_that_is_freed_too_early) {
  Tensor there = torch::ones({10}, gpu(0));
  wait_for(main_, side_);
  Tensor result;
  {
    const c10::StreamGuard guard(side_);
    result = there.exp();
  }
  there.reset();
  EXPECT_TRUE(contains(race_in([&] { (void)torch::empty({5}, gpu(0)); }), "freed too early: aten::exp"));
}

TEST_F(SimulatedStreams, keep_memory_that_is_recorded) {
  Tensor there = torch::ones({10}, gpu(0));
  wait_for(main_, side_);
  Tensor result;
  {
    const c10::StreamGuard guard(side_);
    result = there.exp();
  }
  there.record_stream(side_);
  there.reset();
  (void)torch::empty({5}, gpu(0));
  EXPECT_EQ(simulated_cuda_races(), 0);
}

}  // namespace
}  // namespace lockstep
