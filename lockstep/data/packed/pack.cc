// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <vector>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/data/images/encoded_image.h"
#include "lockstep/data/images/image_kernels.h"
#include "lockstep/data/packed/packed_records.h"
#include "lockstep/datasets.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr std::uint64_t kShuffleSeed = 0x7061636BULL;

std::vector<std::int64_t> order_of(std::int64_t samples, std::int64_t begin, const PackOptions& options) {
  std::vector<std::int64_t> order(to_size(samples));
  (options.keep_order ? sequential_order(samples) : random_order(samples))->draw(kShuffleSeed, 0)(0, order);
  for (std::int64_t& sample : order) sample += begin;
  return order;
}

// Decodes an image, resizes it and encodes it again.
std::vector<std::uint8_t> shrunk(std::span<const std::uint8_t> file, const ImageShape& shape,
                                 const PackOptions& options) {
  const Box whole = whole_image(shape);
  const double scale = static_cast<double>(options.shorter_edge) / std::min(whole.height, whole.width);
  Placement placement{
      .box = whole, .height = std::lround(whole.height * scale), .width = std::lround(whole.width * scale)};
  DecodeScratch scratch;
  const ImageView view = decode_image(file, placement, scratch);
  const std::int64_t plane = placement.height * placement.width;
  std::vector<float> planes(to_size(3 * plane));
  resize_image(view, placement, {}, planes.data());
  std::vector<std::uint8_t> pixels;  // (C, H, W) -> (H, W, C)
  pixels.reserve(planes.size());
  for (std::int64_t i = 0; i < plane; ++i)
    for (const float* value = planes.data() + i; value < planes.data() + 3 * plane; value += plane)
      pixels.push_back(static_cast<std::uint8_t>(std::lround(std::clamp(*value, 0.F, 255.F))));
  return encode_jpeg(pixels.data(), placement.height, placement.width, options.quality);
}

void pack_image(const ImageSource& source, std::int64_t index, const PackOptions& options, RecordWriter& writer) {
  std::vector<std::uint8_t> scratch;
  const StoredImage image = source.read(index, scratch);
  if (!image.encoded)
    return writer.add({.target = image.label,
                       .shape = {image.shape.channels, image.shape.height, image.shape.width},
                       .payload = image.bytes});
  const ImageShape shape = encoded_shape(image.bytes, source.origin(index));
  const bool shrink = options.shorter_edge > 0 && std::min(shape.height, shape.width) > options.shorter_edge;
  const std::vector<std::uint8_t> smaller = shrink ? shrunk(image.bytes, shape, options) : std::vector<std::uint8_t>{};
  writer.add({.target = image.label, .encoded = true, .payload = shrink ? std::span(smaller) : image.bytes});
}

void pack_images(const ImageSource& source, const std::vector<std::int64_t>& order, const PackOptions& options,
                 RecordWriter& writer) {
  for (const std::int64_t index : order) pack_image(source, index, options, writer);
  const auto* folder = dynamic_cast<const ImageFolder*>(&source);
  writer.finish({.name = source.name(),
                 .classes = source.classes(),
                 .class_names = folder != nullptr ? folder->class_names() : std::vector<std::string>{}});
}

void pack_tensors(const TensorDataset& dataset, const std::vector<std::int64_t>& order, RecordWriter& writer) {
  const torch::Tensor& data = dataset.data();
  if (dataset.target().is_floating_point() || dataset.target().dim() != 1)
    throw UsageError(
        {.what = concat(dataset.name(), " has targets other than one whole number per sample, which can't be packed"),
         .next = "train on it directly"});
  const torch::Tensor targets = dataset.target().to(torch::kInt64);
  const std::size_t bytes = data.nbytes() / to_size(data.size(0));
  const auto* rows = static_cast<const std::uint8_t*>(data.const_data_ptr());
  for (const std::int64_t index : order)
    writer.add({.target = targets.const_data_ptr<std::int64_t>()[index],
                .dtype = data.scalar_type(),
                .shape = data.sizes().slice(1).vec(),
                .payload = {rows + to_size(index) * bytes, bytes}});
  const bool classes = targets.numel() > 0;
  writer.finish({.name = dataset.name(), .classes = classes ? targets.max().item<std::int64_t>() + 1 : 0});
}

}  // namespace

// Writes a part of another dataset from that dataset.
void pack(const Dataset& dataset, const std::filesystem::path& folder, const PackOptions& options) {
  const auto* part = dynamic_cast<const SubsetDataset*>(&dataset);
  const Dataset& whole = part != nullptr ? part->whole() : dataset;
  const auto* images = dynamic_cast<const ImageDataset*>(&whole);
  const auto* tensors = dynamic_cast<const TensorDataset*>(&whole);
  if (images == nullptr && tensors == nullptr)
    throw UsageError({.what = concat(dataset.name(), " can't be packed"),
                      .likely = "it is text, which is already one file, or packed already",
                      .next = "pack images, NumPy arrays or tables"});
  RecordWriter writer(folder, options.shard_bytes);
  const auto order = order_of(dataset.size(), part != nullptr ? part->begin() : 0, options);
  if (images != nullptr) return pack_images(images->source(), order, options, writer);
  pack_tensors(*tensors, order, writer);
}

}  // namespace lockstep
