// SPDX-License-Identifier: Apache-2.0
#include <iterator>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/data/loader/batch_memory.h"
#include "lockstep/data/packed/packed_records.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

// The part that a Dataset and an ImageSource of records have in common.
template <class Interface>
class OfRecords : public Interface {
 public:
  explicit OfRecords(std::shared_ptr<const RecordReader> records)
      : records_(std::move(records)),
        first_(first_good_record(*records_)),
        order_(window_order(records_->shard_sizes(), kPackedWindow)) {}

  std::string name() const override { return records_->info().name; }
  std::int64_t size() const override { return records_->size(); }
  void will_read(std::span<const std::int64_t> indices) const override { records_->will_read(indices); }
  std::shared_ptr<const SampleOrder> shuffled_order() const override { return order_; }

 protected:
  const std::shared_ptr<const RecordReader> records_;
  const Record first_;

 private:
  std::shared_ptr<const SampleOrder> order_;
};

// Arrays of one shape and dtype.
class PackedTensors : public OfRecords<Dataset> {
 public:
  using OfRecords::OfRecords;
  Batch make_batch(std::span<const std::int64_t> indices) const override { return assemble({.indices = indices}); }

  Batch assemble(const BatchRequest& request) const override {
    std::vector<std::int64_t> sizes = first_.shape;
    sizes.insert(sizes.begin(), std::ssize(request.indices));
    const bool as_float = c10::isFloatingType(first_.dtype) || first_.dtype == torch::kUInt8;
    Batch batch{allocate_for_batch(request.memory, sizes, as_float ? torch::kFloat32 : torch::kInt64),
                torch::empty({sizes[0]}, torch::kInt64)};
    auto* target = batch.target.data_ptr<std::int64_t>();
    std::vector<std::uint8_t> scratch;
    for (std::int64_t i = 0; i < sizes[0]; ++i) {
      if (request.reading != nullptr)
        request.reading->note([this, index = request.indices[to_size(i)]] { return records_->origin(index); });
      const Record record = checked(request.indices[to_size(i)], scratch);
      batch.data[i].copy_(
          torch::from_blob(const_cast<std::uint8_t*>(record.payload.data()), record.shape, record.dtype));
      target[i] = record.target;
    }
    return batch;
  }

 private:
  Record checked(std::int64_t index, std::vector<std::uint8_t>& scratch) const {
    Record record = records_->read(index, scratch);
    if (record.encoded || record.dtype != first_.dtype || record.shape != first_.shape)
      throw DataError({.what = concat("record ", index, " of ", name(), " has another shape or dtype than the first"),
                       .here = records_->origin(index),
                       .likely = "different kinds of data in one folder"});
    return record;
  }
};

// Images, encoded or as bytes (C, H, W).
class PackedImages : public OfRecords<ImageSource> {
 public:
  using OfRecords::OfRecords;
  std::int64_t classes() const override { return records_->info().classes; }
  ImageShape common_shape() const override { return shape_of(first_); }
  std::string origin(std::int64_t index) const override { return records_->origin(index); }

  StoredImage read(std::int64_t index, std::vector<std::uint8_t>& scratch) const override {
    const Record record = records_->read(index, scratch);
    if (!record.is_image() || record.target < 0 || record.target >= classes())
      throw DataError({.what = concat("not an image with a label below ", classes()),
                       .likely = "different kinds of data in one folder"});
    return {.bytes = record.payload, .encoded = record.encoded, .shape = shape_of(record), .label = record.target};
  }

 private:
  static ImageShape shape_of(const Record& record) {
    if (record.encoded) return {3, 0, 0};
    return {record.shape[0], record.shape[1], record.shape[2]};
  }
};

}  // namespace

Record first_good_record(const RecordReader& records, std::vector<std::uint8_t>& scratch) {
  for (std::int64_t i = 0; i + 1 < records.size(); ++i) {
    try {
      return records.read(i, scratch);
    } catch (const DataError&) {  // reported, or skipped, when a batch needs it
    }
  }
  if (records.size() == 0)
    throw DataError(
        {.what = concat(records.folder().string(), " holds no records"), .likely = "an empty dataset was packed"});
  return records.read(records.size() - 1, scratch);
}

Record first_good_record(const RecordReader& records) {
  std::vector<std::uint8_t> scratch;
  Record record = first_good_record(records, scratch);
  record.payload = {};
  return record;
}

std::shared_ptr<const Dataset> open_packed(std::shared_ptr<const RecordReader> records,
                                           const ImageTransforms& transforms) {
  if (!first_good_record(*records).is_image()) return std::make_shared<PackedTensors>(std::move(records));
  return std::make_shared<ImageDataset>(std::make_shared<PackedImages>(std::move(records)), transforms);
}

std::shared_ptr<const Dataset> open_packed(const std::filesystem::path& folder, const ImageTransforms& transforms) {
  return open_packed(std::make_shared<RecordReader>(folder), transforms);
}

}  // namespace lockstep
