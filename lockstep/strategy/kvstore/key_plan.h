// strategy/kvstore/key_plan.h: which server holds what: keys are spread over the servers, large ones are split.
//
// Flow:    names and shapes of the keys -> here -> dist_kvstore.h (where to send), server_table.h (what lies where)
// Threads: values
// Ranks:   no communication: every worker computes the same plan
//
// A server's part of the keys is one block of bytes, in the order of the keys: a range of keys is one run of bytes. A
// large key is several slices, so that some are on their way while others are merged.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace lockstep {

struct Key {
  std::string name;
  std::int64_t elements = 0;
  std::int64_t rows = 1;  // entries of the first dimension: what is split and pulled as a whole
  torch::ScalarType dtype = torch::kFloat32;
  bool trained = true;  // false: pushed values replace it, as for buffers of a model
};

// Keys [first, last), by number.
struct KeyRange {
  std::int64_t first = 0;
  std::int64_t last = 0;
  std::int64_t size() const { return last - first; }
};

// Slices [first, last) of one server, by their place in its layout.
struct SliceRange {
  std::int64_t first = 0;
  std::int64_t last = 0;
  std::int64_t size() const { return last - first; }
};

// The part of a key that a server has: elements [begin, begin + count). Travels as it is.
struct KeySlice {
  std::int64_t key = 0;
  std::int64_t begin = 0;
  std::int64_t count = 0;
  std::int64_t offset = 0;  // in the server's block, bytes
  std::int64_t dtype = 0;   // a torch::ScalarType
  std::int64_t trained = 0;

  torch::ScalarType scalar_type() const { return static_cast<torch::ScalarType>(dtype); }
  std::int64_t bytes() const { return count * static_cast<std::int64_t>(c10::elementSize(scalar_type())); }
  torch::Tensor in(const torch::Tensor& block) const;  // the slice, (count), where `block` holds it
};

// What one server has, in the order of the keys.
class BlockLayout {
 public:
  BlockLayout() = default;
  explicit BlockLayout(std::vector<KeySlice> slices);
  void add(const Key& key, std::int64_t number, std::int64_t begin, std::int64_t count);

  const std::vector<KeySlice>& slices() const { return slices_; }
  std::int64_t bytes() const { return bytes_; }
  SliceRange range_of(KeyRange keys) const;
  std::span<const KeySlice> slices_of(SliceRange range) const;
  torch::Tensor region_of(SliceRange range, const torch::Tensor& block) const;  // its run of bytes in `block`

  // The range in parts of at least `bytes`, if there is so much; at least one part, which may be empty.
  std::vector<SliceRange> parts_of(SliceRange range, std::int64_t bytes) const;

 private:
  std::vector<KeySlice> slices_;
  std::int64_t bytes_ = 0;
};

struct KeyPlanOptions {
  int servers = 1;
  std::int64_t split_above = 1'000'000;  // elements: MXNet's MXNET_KVSTORE_BIGARRAY_BOUND
};

// A key of at least split_above elements is split at rows, evenly over all servers, and there into slices of about
// 256 KiB that follow each other without a gap; another one goes to the server that has the fewest bytes so far. S2.
std::vector<BlockLayout> plan_keys(const std::vector<Key>& keys, const KeyPlanOptions& options);

}  // namespace lockstep
