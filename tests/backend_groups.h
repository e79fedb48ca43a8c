// SPDX-License-Identifier: Apache-2.0
// tests/backend_groups.h: groups of threads over the c10d backend, on one machine or several; and data to exchange.
#pragma once

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <thread>
#include <vector>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/collective/c10d/backend.h"
#include "tests/support.h"

namespace lockstep::testing::backend {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Tensors = std::vector<at::Tensor>;

constexpr auto kTimeout = std::chrono::seconds(20);

// The machine that each rank counts as: shared memory inside one, Gloo over the loopback interface between them.
using Machines = std::vector<int>;

inline Machines one_machine(int size) { return Machines(to_size(size), 0); }

inline GroupPtr make_group(const StorePtr& store, int rank, int size, int machine = 0) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
  group->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::CUSTOM,
                    make_c10d_backend(store, rank, size, kTimeout, concat("machine ", machine)));
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  return group;
}

// Runs `body` once per rank, each rank a thread; a failure of any fails the test.
inline void run_threads(int size, const std::function<void(int rank, const StorePtr& store)>& body) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      try {
        body(rank, store);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
}

inline void run_group(const Machines& machines, const std::function<void(const GroupPtr& group)>& body) {
  const int size = static_cast<int>(machines.size());
  run_threads(size,
              [&](int rank, const StorePtr& store) { body(make_group(store, rank, size, machines[to_size(rank)])); });
}

inline void run_group(int size, const std::function<void(const GroupPtr& group)>& body) {
  run_group(one_machine(size), body);
}

// Not ProcessGroup's own barrier(): libtorch 2.11 keeps a tensor of it in a static variable, which threads that call it
// at the same time free twice.
inline c10::intrusive_ptr<c10d::Work> barrier(const GroupPtr& group, const c10d::BarrierOptions& options = {}) {
  return group->getBackend(c10::kCPU)->barrier(options);
}

// What rank r has: small integers, so that sums are exact.
inline torch::Tensor data_of(int rank, int64_t elements = 1001, torch::ScalarType dtype = torch::kFloat32) {
  return (torch::arange(elements) % 5 + rank + 1).to(dtype);
}

inline torch::Tensor sum_of_all(int size, int64_t elements = 1001) {
  torch::Tensor sum = torch::zeros({elements});
  for (int rank = 0; rank < size; ++rank) sum += data_of(rank, elements);
  return sum;
}

inline Tensors data_of_all(int size) {
  Tensors all;
  for (int rank = 0; rank < size; ++rank) all.push_back(data_of(rank));
  return all;
}

inline Tensors zeros(int count, int64_t elements) {
  Tensors all(to_size(count));
  for (torch::Tensor& tensor : all) tensor = torch::zeros({elements});
  return all;
}

inline void expect_equal(const torch::Tensor& actual, const torch::Tensor& expected) {
  EXPECT_TRUE(torch::equal(actual, expected)) << actual << "\ninstead of\n" << expected;
}

inline void expect_equal(const Tensors& actual, const Tensors& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) expect_equal(actual[i], expected[i]);
}

}  // namespace lockstep::testing::backend
