// SPDX-License-Identifier: Apache-2.0
// strategy/kvstore/store.h: what all stores have in common: keys by number instead of name.
//
// Flow:    lockstep/kvstore.h -> here -> local_store.h, client.h
// Owns:    the list of keys
// Threads: one thread
// Ranks:   as lockstep/kvstore.h
#pragma once

#include <map>

#include "lockstep/kvstore.h"
#include "lockstep/strategy/kvstore/key_plan.h"

namespace lockstep {

class Store : public KVStore {
 public:
  void init(const std::vector<NamedTensor>& values, const std::vector<NamedTensor>& buffers = {}) final;
  void push(const Names& names, const DeviceTensors& values, const PushOptions& options = {}) final;
  void pull(const Names& names, const DeviceTensors& into) final;
  void push_pull(const Names& names, const DeviceTensors& values, const DeviceTensors& into,
                 const PushOptions& options = {}) final;
  torch::Tensor row_sparse_pull(const std::string& name, const torch::Tensor& rows) final;

  // The same for neighbouring keys: what a strategy calls in each step.
  virtual void push(KeyRange keys, const DeviceTensors& values, const PushOptions& options) = 0;
  virtual void pull(KeyRange keys, const DeviceTensors& into) = 0;
  virtual void push_pull(KeyRange keys, const DeviceTensors& values, const DeviceTensors& into,
                         const PushOptions& options);

  const std::vector<Key>& keys() const { return keys_; }

 protected:
  virtual void create(const std::vector<torch::Tensor>& values) = 0;                // keys() are known
  virtual torch::Tensor pull_rows(std::size_t key, const torch::Tensor& rows) = 0;  // (rows, elements of a row)

 private:
  std::size_t number_of(const std::string& name) const;
  template <class Call>
  void for_each_run(const Names& names, const Call& call) const;

  std::vector<Key> keys_;
  std::map<std::string, std::size_t> numbers_;  // by name
};

}  // namespace lockstep
