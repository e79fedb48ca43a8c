// data/packed_dataset.h: packed records as a dataset, and any other dataset as packed records.
//
// Flow:    pack() -> a folder of shards -> open_packed() -> data/loader.h
// Threads: datasets are const after construction
#pragma once

#include <filesystem>
#include <memory>

#include "lockstep/data/dataset.h"
#include "lockstep/data/image_source.h"
#include "lockstep/data/image_transforms.h"
#include "lockstep/data/packed_records.h"

namespace lockstep {

constexpr std::int64_t kPackedWindow = 16384;  // samples that are shuffled with each other

// Packed images, encoded or as bytes (C, H, W).
class PackedImages : public ImageSource {
 public:
  explicit PackedImages(std::shared_ptr<const RecordReader> records, std::int64_t window = kPackedWindow);

  std::string name() const override { return records_->info().name; }
  std::int64_t size() const override { return records_->size(); }
  std::int64_t channels() const override { return first_.channels; }
  std::int64_t classes() const override { return records_->info().classes; }
  ImageShape common_shape() const override { return first_; }
  StoredImage read(std::int64_t index, std::vector<std::uint8_t>& scratch) const override;
  void will_read(std::span<const std::int64_t> indices) const override { records_->will_read(indices); }
  std::string origin(std::int64_t index) const override { return records_->origin(index); }
  std::shared_ptr<const SampleOrder> shuffled_order() const override { return order_; }

 private:
  std::shared_ptr<const RecordReader> records_;
  std::shared_ptr<const SampleOrder> order_;
  ImageShape first_;
};

// Images become an ImageDataset with these transforms; other arrays of one shape a dataset that converts them as
// TensorDataset does. Shuffled, the shards come in random order, and samples are shuffled within windows.
// Throws what RecordReader throws; DataError: no records, or none that can be read.
std::shared_ptr<const Dataset> open_packed(const std::filesystem::path& folder, const ImageTransforms& transforms,
                                           std::int64_t window = kPackedWindow);

// What the records are like. Throws DataError: no records, or none that can be read.
Record first_good_record(const RecordReader& records);
bool holds_images(const RecordReader& records);

struct PackOptions {
  std::uint64_t shard_bytes = std::uint64_t{256} << 20;
  bool keep_order = false;       // else the records are written in a random order: classes lie side by side in folders
  std::int64_t shorter_edge = 0;  // encoded images are resized to it, if it is longer, and become JPEG; 0: as they are
  int quality = 90;              // of such a JPEG
};

// Writes every sample of images or tensors as it is stored, without transforms. Throws UsageError: another kind of dataset;
// what the dataset, RecordWriter and the decoder throw.
void pack(const Dataset& dataset, const std::filesystem::path& folder, const PackOptions& options = {});

}  // namespace lockstep
