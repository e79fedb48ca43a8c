// SPDX-License-Identifier: Apache-2.0
// collective/meet/connecting_store.h: the store of ranks that are connecting: a rank that fails tells the others, which would
// wait for it until their deadline.
//
// Flow:    connect.cc makes it over the job's store -> exchange_texts, Gloo's rendezvous
// Owns:    nothing; it keeps the store beneath
// Threads: as the store beneath
// Ranks:   one for each rank, over the same keys
#pragma once

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <string>
#include <vector>

#include "lockstep/collective/meet/store_ptr.h"
#include "lockstep/deadline.h"

namespace lockstep {

class ConnectingStore final : public c10d::PrefixStore {
 public:
  // Keys of its own for each connection that this rank makes over `store`, numbered in the order in which it makes them.
  ConnectingStore(const StorePtr& store, int rank);

  // The waits of the other ranks, and those that they begin later, throw RendezvousError with this text, unless another
  // rank has failed before. Never throws.
  void fail(const std::string& here, const std::string& what);

  // As PrefixStore's, but also throw RendezvousError when a rank has failed.
  void wait(const std::vector<std::string>& keys) override { wait(keys, getTimeout()); }
  void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override;
  std::vector<uint8_t> get(const std::string& key) override;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;

 private:
  void require_no_failure();
};

}  // namespace lockstep
