// SPDX-License-Identifier: Apache-2.0
// strategy/kvstore/key_plan.h: which server holds which part of which key.
//
// Flow:    names and shapes of the keys -> here -> worker.cc (where to send), server_table.h (what lies where)
// Threads: values
// Ranks:   no communication: every worker computes the same plan
//
// A key is a tensor with a name. A server holds slices of keys, in one block of bytes, in the order of the keys; so the
// slices of neighbouring keys are one run of bytes. A large key has several slices on each server, so that some can be
// merged while others are still being sent.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/base/int_vector.h"
#include "lockstep/named_tensor.h"

namespace lockstep {

// A key as servers know it. Sent as raw bytes.
struct Key {
  int64_t elements = 0;
  int64_t rows = 1;  // size of the first dimension; keys are split between rows
  torch::ScalarType dtype = torch::kFloat32;
  bool trained = true;  // false: a buffer, which a push replaces even where there is an optimizer
};

// Keys [first, last), by number.
struct KeyRange {
  size_t first = 0;
  size_t last = 0;
  size_t size() const { return last - first; }
};

// Slices [first, last) of one server, by their place in its layout.
struct SliceRange {
  size_t first = 0;
  size_t last = 0;
  size_t size() const { return last - first; }
};

// Elements [begin, begin + count) of a key, on one server.
struct KeySlice {
  size_t key = 0;
  int64_t begin = 0;
  int64_t count = 0;
  int64_t offset = 0;  // in the server's block, bytes
  torch::ScalarType dtype = torch::kFloat32;
  bool trained = false;

  int64_t bytes() const { return count * to_int64(c10::elementSize(dtype)); }
  Tensor in_block(const Tensor& block) const;  // this slice, (count), as a view of the server's block
  Tensor in_value(const Tensor& value) const;  // the same as a view of the whole value, in memory order
  bool operator==(const KeySlice&) const = default;
};

// The slices of one server, in the order of the keys.
class BlockLayout {
 public:
  void add(const Key& key, size_t number, int64_t begin, int64_t count);

  const std::vector<KeySlice>& slices() const { return slices_; }
  int64_t bytes() const;
  SliceRange range_of(KeyRange keys) const;
  std::span<const KeySlice> slices_of(SliceRange range) const;
  Tensor region_of(SliceRange range, const Tensor& block) const;  // its run of bytes in `block`

  // Cuts a range into the parts that kPushPull sends one by one: each about a sixteenth of the block, at least 256 KiB.
  // At least one part, which may be empty.
  std::vector<SliceRange> parts_of(SliceRange range) const;

 private:
  std::vector<KeySlice> slices_;
};

// One layout per server. A key of at least split_above elements (MXNet's MXNET_KVSTORE_BIGARRAY_BOUND) is split between rows, evenly over all servers, and on
// each into slices of 65,536 elements (256 KiB of float32) without gaps between them. A smaller key goes whole to the
// server with the fewest bytes so far.
std::vector<BlockLayout> plan_keys(const std::vector<Key>& keys, size_t servers, int64_t split_above);

}  // namespace lockstep
