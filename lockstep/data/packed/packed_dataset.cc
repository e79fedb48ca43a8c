// SPDX-License-Identifier: Apache-2.0
#include <iterator>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/data/loader/batch_memory.h"
#include "lockstep/data/packed/packed_records.h"
#include "lockstep/datasets.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

bool is_packed_image(const Record& record) {
  return record.encoded || (record.dtype == torch::kUInt8 && record.shape.size() == 3);
}

ImageShape image_shape(const Record& record) {
  if (record.encoded) return {3, 0, 0};
  return {record.shape[0], record.shape[1], record.shape[2]};
}

// Arrays of one shape and dtype.
class PackedTensors : public Dataset {
 public:
  PackedTensors(std::shared_ptr<const RecordReader> records, std::int64_t window)
      : records_(std::move(records)),
        order_(window_order(records_->shard_sizes(), window)),
        first_(first_good_record(*records_)) {}

  std::string name() const override { return records_->info().name; }
  std::int64_t size() const override { return records_->size(); }
  std::shared_ptr<const SampleOrder> shuffled_order() const override { return order_; }
  void will_read(std::span<const std::int64_t> indices) const override { records_->will_read(indices); }
  Batch make_batch(std::span<const std::int64_t> indices) const override { return assemble({.indices = indices}); }

  Batch assemble(const BatchRequest& request) const override {
    std::vector<std::int64_t> sizes = first_.shape;
    sizes.insert(sizes.begin(), std::ssize(request.indices));
    const bool as_float = c10::isFloatingType(first_.dtype) || first_.dtype == torch::kUInt8;
    Batch batch{allocate_for_batch(request.memory, sizes, as_float ? torch::kFloat32 : torch::kInt64),
                torch::empty({sizes[0]}, torch::kInt64)};
    auto* target = batch.target.data_ptr<std::int64_t>();
    for (std::int64_t i = 0; i < sizes[0]; ++i) {
      const Record record = checked(request.indices[to_size(i)]);
      batch.data[i].copy_(
          torch::from_blob(const_cast<std::uint8_t*>(record.payload.data()), record.shape, record.dtype));
      target[i] = record.target;
    }
    return batch;
  }

 private:
  Record checked(std::int64_t index) const {
    Record record = records_->read(index);
    if (record.encoded || record.dtype != first_.dtype || record.shape != first_.shape)
      throw DataError({.what = concat("record ", index, " of ", name(), " has another shape or dtype than the first"),
                       .here = records_->origin(index),
                       .likely = "different kinds of data in one folder"});
    return record;
  }

  std::shared_ptr<const RecordReader> records_;
  std::shared_ptr<const SampleOrder> order_;
  Record first_;
};

// Images, encoded or as bytes (C, H, W).
class PackedImages : public ImageSource {
 public:
  PackedImages(std::shared_ptr<const RecordReader> records, std::int64_t window)
      : records_(std::move(records)),
        order_(window_order(records_->shard_sizes(), window)),
        first_(image_shape(first_good_record(*records_))) {}

  std::string name() const override { return records_->info().name; }
  std::int64_t size() const override { return records_->size(); }
  std::int64_t channels() const override { return first_.channels; }
  std::int64_t classes() const override { return records_->info().classes; }
  ImageShape common_shape() const override { return first_; }
  void will_read(std::span<const std::int64_t> indices) const override { records_->will_read(indices); }
  std::string origin(std::int64_t index) const override { return records_->origin(index); }
  std::shared_ptr<const SampleOrder> shuffled_order() const override { return order_; }

  StoredImage read(std::int64_t index, std::vector<std::uint8_t>&) const override {
    const Record record = records_->read(index);
    if (!is_packed_image(record) || record.target < 0 || record.target >= classes())
      throw DataError({.what = concat("not an image with a label below ", classes()),
                       .likely = "different kinds of data in one folder"});
    return {.bytes = record.payload,
            .encoded = record.encoded,
            .shape = record.encoded ? ImageShape{} : image_shape(record),
            .label = record.target};
  }

 private:
  std::shared_ptr<const RecordReader> records_;
  std::shared_ptr<const SampleOrder> order_;
  ImageShape first_;
};

}  // namespace

Record first_good_record(const RecordReader& records) {
  for (std::int64_t i = 0; i + 1 < records.size(); ++i) {
    try {
      return records.read(i);
    } catch (const DataError&) {  // reported, or skipped, when a batch needs it
    }
  }
  if (records.size() == 0)
    throw DataError(
        {.what = concat(records.folder().string(), " holds no records"), .likely = "an empty dataset was packed"});
  return records.read(records.size() - 1);
}

bool holds_images(const RecordReader& records) { return is_packed_image(first_good_record(records)); }

std::shared_ptr<const Dataset> open_packed(const std::filesystem::path& folder, const ImageTransforms& transforms,
                                           std::int64_t window) {
  auto records = std::make_shared<RecordReader>(folder);
  if (!holds_images(*records)) return std::make_shared<PackedTensors>(std::move(records), window);
  return std::make_shared<ImageDataset>(std::make_shared<PackedImages>(std::move(records), window), transforms);
}

}  // namespace lockstep
