#include "lockstep/data/fashion_mnist.h"

#include <array>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/data/idx.h"

namespace lockstep {
namespace {

constexpr std::int64_t kPixels = 28 * 28;
// Of the training images scaled to [0, 1]; a test computes them again.
constexpr float kMean = 0.2860F;
constexpr float kDeviation = 0.3530F;

std::filesystem::path find_file(const std::filesystem::path& folder, const std::string& name) {
  const auto plain = folder / name;
  return std::filesystem::exists(plain) ? plain : folder / (name + ".gz");
}

void check_images(const torch::Tensor& images, const std::filesystem::path& file) {
  if (images.dim() == 3 && images.size(1) == 28 && images.size(2) == 28 && images.size(0) > 0) return;
  throw DataError({.what = concat(file.filename().string(), " holds shape ", images.sizes(), ", not (N, 28, 28)"),
                   .here = concat(file.string(), ", offset 4"),
                   .likely = "another dataset, or labels where images belong",
                   .next = "look at the files in --data-dir"});
}

void check_labels(const torch::Tensor& labels, std::int64_t images, const std::filesystem::path& file) {
  if (labels.dim() != 1 || labels.size(0) != images)
    throw DataError({.what = concat(images, " images, but labels of shape ", labels.sizes()),
                     .here = concat(file.string(), ", offset 4"),
                     .likely = "files of different datasets or splits in one folder",
                     .next = "look at the files in --data-dir"});
  const auto wrong = labels.ge(FashionMNIST::kClasses).nonzero();
  if (wrong.numel() == 0) return;
  const auto first = wrong[0].item<std::int64_t>();
  throw DataError({.what = concat("label ", labels[first].item<int>(), " of sample ", first, " is not in 0..9"),
                   .here = concat(file.string(), ", offset ", 8 + first),
                   .likely = "a damaged file, or another dataset",
                   .next = "fetch the file again"});
}

// value -> (value / 255 - mean) / deviation, for the 256 values that a pixel can have.
std::array<float, 256> make_normalised() {
  std::array<float, 256> table{};
  for (std::size_t value = 0; value < table.size(); ++value)
    table[value] = (static_cast<float>(value) / 255.0F - kMean) / kDeviation;
  return table;
}

void normalise(const std::uint8_t* pixels, float* into) {
  static const std::array<float, 256> kNormalised = make_normalised();
  for (std::int64_t i = 0; i < kPixels; ++i) into[i] = kNormalised[pixels[i]];
}

}  // namespace

FashionMNIST::FashionMNIST(const std::filesystem::path& folder, Split split) {
  const std::string prefix = split == Split::kTrain ? "train" : "t10k";
  const auto image_file = find_file(folder, prefix + "-images-idx3-ubyte");
  const auto label_file = find_file(folder, prefix + "-labels-idx1-ubyte");
  images_ = read_idx(image_file);
  check_images(images_, image_file);
  const torch::Tensor labels = read_idx(label_file);
  check_labels(labels, images_.size(0), label_file);
  labels_ = labels.to(torch::kInt64);
}

Batch FashionMNIST::make_batch(std::span<const std::int64_t> indices) const {
  const auto samples = static_cast<std::int64_t>(indices.size());
  Batch batch{torch::empty({samples, 1, 28, 28}), torch::empty({samples}, torch::kInt64)};
  const auto* images = images_.data_ptr<std::uint8_t>();
  const auto* labels = labels_.data_ptr<std::int64_t>();
  auto* data = batch.data.data_ptr<float>();
  auto* target = batch.target.data_ptr<std::int64_t>();
  for (const std::int64_t index : indices) {
    normalise(images + index * kPixels, data);
    data += kPixels;
    *target++ = labels[index];
  }
  return batch;
}

}  // namespace lockstep
