// SPDX-License-Identifier: Apache-2.0
#include <iomanip>

#include <nlohmann/json.hpp>

#include "lockstep/base/cache_line.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/data/formats/readers.h"
#include "lockstep/data/images/encoded_image.h"
#include "lockstep/data/webdataset/shards.h"

namespace lockstep {
namespace {

std::string shard_name(size_t number) { return concat(std::setfill('0'), std::setw(5), number, ".tar"); }

template <class Content>
std::string tar_member(const std::string& name, const Content& content) {
  std::string bytes = tar_header(name, content.size());
  bytes.append(content.begin(), content.end());
  bytes.resize(round_up(bytes.size(), size_t{kTarBlock}));
  return bytes;
}

constexpr uint64_t kShuffleSeed = 0x7061636BULL;

std::vector<int64_t> order_of(int64_t samples, int64_t begin, const PackOptions& options) {
  std::vector<int64_t> order(to_size(samples));
  (options.keep_order ? sequential_order(samples) : random_order(samples))->draw(kShuffleSeed, 0)(0, order);
  for (int64_t& sample : order) sample += begin;
  return order;
}

void pack_image(const ImageSource& source, int64_t index, ShardWriter& writer) {
  Bytes scratch;
  const StoredImage image = source.read(index, scratch);
  if (!image.encoded)
    return writer.add({.target = image.label,
                       .shape = {image.shape.channels, image.shape.height, image.shape.width},
                       .payload = image.bytes});
  encoded_shape(image.bytes, source.origin(index));  // throws if it is damaged
  writer.add({.target = image.label, .encoded = true, .payload = image.bytes});
}

void pack_images(const ImageSource& source, const std::vector<int64_t>& order, ShardWriter& writer) {
  for (const int64_t index : order) pack_image(source, index, writer);
  const auto* folder = dynamic_cast<const ImageFolder*>(&source);
  writer.finish({.name = source.name(),
                 .classes = source.classes(),
                 .class_names = folder != nullptr ? folder->class_names() : std::vector<std::string>{}});
}

void pack_tensors(const TensorDataset& dataset, const std::vector<int64_t>& order, ShardWriter& writer) {
  const Tensor& data = dataset.data();
  if (dataset.target().is_floating_point() || dataset.target().dim() != 1 || !dataset.more().empty())
    throw UsageError(
        {.what = concat(dataset.name(), " can't be packed: a packed sample has one whole number beside its data"),
         .next = "train on it directly"});
  const Tensor targets = dataset.target().to(torch::kInt64);
  const size_t bytes = data.nbytes() / to_size(data.size(0));
  const auto* rows = static_cast<const uint8_t*>(data.const_data_ptr());
  for (const int64_t index : order)
    writer.add({.target = targets.const_data_ptr<int64_t>()[index],
                .dtype = data.scalar_type(),
                .shape = data.sizes().slice(1).vec(),
                .payload = {rows + to_size(index) * bytes, bytes}});
  writer.finish({.name = dataset.name(), .classes = dataset.classes()});
}

}  // namespace

ShardWriter::ShardWriter(fs::path folder, uint64_t shard_bytes)
    : folder_(std::move(folder)), shard_bytes_(shard_bytes) {
  make_folder(folder_);
  if (fs::exists(folder_ / kShardsFile) || !tars_in(folder_).empty())
    throw UsageError({.what = concat(folder_.string(), " holds shards already"), .next = "name another folder"});
}

void ShardWriter::add(const ShardSample& sample) {
  const std::string key = concat(std::setfill('0'), std::setw(6), samples_++);
  const char* const extension = !sample.encoded ? ".npy" : is_jpeg(sample.payload) ? ".jpg" : ".png";
  const std::string header = sample.encoded ? "" : npy_header(sample.dtype, sample.shape);
  Bytes content(header.begin(), header.end());
  content.insert(content.end(), sample.payload.begin(), sample.payload.end());
  const std::string bytes =
      tar_member(key + ".cls", std::to_string(sample.target)) + tar_member(key + extension, content);
  if (checksums_.empty()) write_file(folder_ / kShardsFile, "{}\n");  // not finished
  if (!file_) {
    file_.emplace(folder_ / shard_name(checksums_.size()));
    written_ = 0;
    checksums_.emplace_back();
  }
  file_->write(bytes.data(), bytes.size());
  checksums_.back().push_back(checksum_of(content, sample.target));
  written_ += bytes.size();
  if (written_ >= shard_bytes_) close_shard();
}

void ShardWriter::close_shard() {
  const std::string end(2 * kTarBlock, '\0');
  file_->write(end.data(), end.size());
  file_->commit();
  file_.reset();
}

// wids, WebDataset's reader with an index, takes this file too.
void ShardWriter::finish(const ShardInfo& info) {
  using Json = nlohmann::ordered_json;
  if (file_) close_shard();
  Json shards = Json::array();
  for (const auto& checksums : checksums_) {
    const std::string name = shard_name(shards.size());
    shards.push_back({{"url", name},
                      {"nsamples", checksums.size()},
                      {"filesize", fs::file_size(folder_ / name)},
                      {"xxh3", checksums}});
  }
  const Json json = {
      {"__kind__", "wids-shard-index-v1"}, {"wids_version", 1},  {"name", info.name}, {"classes", info.classes},
      {"class_names", info.class_names},   {"shardlist", shards}};
  write_file(folder_ / kShardsFile, json.dump() + "\n");
}

// Writes a part of another dataset from that dataset.
void pack(const Dataset& dataset, const fs::path& folder, const PackOptions& options) {
  const auto* part = dynamic_cast<const SubsetDataset*>(&dataset);
  const Dataset& whole = part != nullptr ? part->whole() : dataset;
  const auto* images = dynamic_cast<const ImageDataset*>(&whole);
  const auto* tensors = dynamic_cast<const TensorDataset*>(&whole);
  if (images == nullptr && tensors == nullptr)
    throw UsageError({.what = concat(dataset.name(), " can't be packed"),
                      .likely = "it is text, which is already one file, or packed already",
                      .next = "pack images, NumPy arrays or tables"});
  ShardWriter writer(folder, options.shard_bytes);
  const auto order = order_of(dataset.size(), part != nullptr ? part->begin() : 0, options);
  if (images != nullptr) return pack_images(images->source(), order, writer);
  pack_tensors(*tensors, order, writer);
}

}  // namespace lockstep
