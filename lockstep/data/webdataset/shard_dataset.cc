// SPDX-License-Identifier: Apache-2.0
#include <iterator>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/data/loader/batch_memory.h"
#include "lockstep/data/webdataset/shards.h"

namespace lockstep {
namespace {

constexpr int64_t kShardWindow = 16384;  // samples that are shuffled with each other

// The part that a Dataset and an ImageSource of shards have in common.
template <class Interface>
class OfShards : public Interface {
 public:
  explicit OfShards(std::shared_ptr<const ShardReader> samples)
      : samples_(std::move(samples)), order_(window_order(samples_->shard_sizes(), kShardWindow)) {}

  std::string name() const override { return samples_->info().name; }
  int64_t size() const override { return samples_->size(); }
  int64_t classes() const override { return samples_->info().classes; }
  void will_read(Indices indices) const override { samples_->will_read(indices); }
  SampleOrderPtr shuffled_order() const override { return order_; }

 protected:
  const std::shared_ptr<const ShardReader> samples_;
  const SampleOrderPtr order_;
};

// Arrays of one shape and dtype.
class ShardTensors : public OfShards<AssembledDataset> {
 public:
  using OfShards::OfShards;

  Batch assemble(const BatchRequest& request) const override {
    const ShardSample& first = samples_->first();
    std::vector<int64_t> sizes = first.shape;
    sizes.insert(sizes.begin(), std::ssize(request.indices));
    const bool as_float = c10::isFloatingType(first.dtype) || first.dtype == torch::kUInt8;
    Batch batch{allocate_for_batch(request.memory, sizes, as_float ? torch::kFloat32 : torch::kInt64),
                torch::empty({sizes[0]}, torch::kInt64)};
    auto* target = batch.target.data_ptr<int64_t>();
    Bytes scratch;
    for (int64_t i = 0; i < sizes[0]; ++i) {
      const ShardSample sample = checked(request.indices[to_size(i)], scratch);
      batch.data[i].copy_(torch::from_blob(const_cast<uint8_t*>(sample.payload.data()), sample.shape, sample.dtype));
      target[i] = sample.target;
    }
    return batch;
  }

 private:
  ShardSample checked(int64_t index, Bytes& scratch) const {
    ShardSample sample = samples_->read(index, scratch);
    const ShardSample& first = samples_->first();
    if (sample.encoded || sample.dtype != first.dtype || sample.shape != first.shape)
      throw DataError({.what = concat("sample ", index, " of ", name(), " has another shape or dtype than the first"),
                       .here = samples_->origin(index),
                       .likely = "different kinds of data in one folder"});
    return sample;
  }
};

// Images, encoded or as bytes (C, H, W).
class ShardImages : public OfShards<ImageSource> {
 public:
  using OfShards::OfShards;
  ImageShape common_shape() const override { return shape_of(samples_->first()); }
  std::string origin(int64_t index) const override { return samples_->origin(index); }

  StoredImage read(int64_t index, Bytes& scratch) const override {
    const ShardSample sample = samples_->read(index, scratch);
    if (!sample.is_image() || sample.target < 0 || sample.target >= classes())
      throw DataError({.what = concat("not an image with a label below ", classes()),
                       .likely = "different kinds of data in one folder"});
    return {.bytes = sample.payload, .encoded = sample.encoded, .shape = shape_of(sample), .label = sample.target};
  }

 private:
  static ImageShape shape_of(const ShardSample& sample) {
    if (sample.encoded) return {3, 0, 0};
    return {sample.shape[0], sample.shape[1], sample.shape[2]};
  }
};

}  // namespace

DatasetPtr dataset_of(std::shared_ptr<const ShardReader> samples, const ImageTransforms& transforms) {
  if (!samples->first().is_image()) return std::make_shared<ShardTensors>(std::move(samples));
  return std::make_shared<ImageDataset>(std::make_shared<ShardImages>(std::move(samples)), transforms);
}

}  // namespace lockstep
