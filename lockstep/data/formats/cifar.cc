// SPDX-License-Identifier: Apache-2.0
#include "lockstep/datasets.h"

#include <iterator>

#include "lockstep/base/text.h"
#include "lockstep/data/formats/data_file.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

// A record is the label (CIFAR-100: the coarse one of 20, then the fine one of 100) and 3072 bytes: the red, the green
// and the blue plane.
constexpr std::int64_t kPixels = std::int64_t{3} * 32 * 32;

struct Variant {
  const char* name;
  std::int64_t label_bytes;  // the last of them is the label
  std::int64_t classes;
};
constexpr Variant kTen{"cifar-10", 1, 10};
constexpr Variant kHundred{"cifar-100", 2, 100};

// (records, bytes of a record)
torch::Tensor records_in(const DataFile& file, std::int64_t record_bytes) {
  const auto bytes = static_cast<std::int64_t>(file.size());
  if (bytes == 0 || bytes % record_bytes != 0)
    throw DataError({.what = concat(file.path().filename().string(), " has ", bytes,
                                    " bytes, no whole number of records of ", record_bytes),
                     .here = file.path().string(),
                     .likely = "an interrupted download, or the Python version of the dataset",
                     .next = "fetch the binary version"});
  torch::Tensor records = torch::empty({bytes / record_bytes, record_bytes}, torch::kUInt8);
  file.read(0, {records.data_ptr<std::uint8_t>(), file.size()});
  return records;
}

std::shared_ptr<const ImageSource> read_files(const Variant& variant, const std::filesystem::path& folder,
                                              const std::vector<std::string>& names) {
  std::vector<torch::Tensor> pixels;
  std::vector<torch::Tensor> labels;
  for (const std::string& name : names) {
    const torch::Tensor records = records_in(DataFile(folder / name), variant.label_bytes + kPixels);
    pixels.push_back(records.slice(1, variant.label_bytes));
    labels.push_back(records.select(1, variant.label_bytes - 1));
  }
  return std::make_shared<MemoryImages>(variant.name, torch::cat(pixels).view({-1, 3, 32, 32}), torch::cat(labels),
                                        variant.classes, folder.string());
}

std::vector<std::string> ten_files(Split split) {
  if (split == Split::kValidation) return {"test_batch.bin"};
  return {"data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin", "data_batch_5.bin"};
}

}  // namespace

ImageTransforms CIFAR10::normalised() {
  return {.mean = {0.4914F, 0.4822F, 0.4465F}, .deviation = {0.2470F, 0.2435F, 0.2616F}};
}

CIFAR10::CIFAR10(const std::filesystem::path& folder, Split split, const ImageTransforms& transforms)
    : ImageDataset(read_files(kTen, folder, ten_files(split)), transforms) {}

ImageTransforms CIFAR100::normalised() {
  return {.mean = {0.5071F, 0.4865F, 0.4409F}, .deviation = {0.2673F, 0.2564F, 0.2762F}};
}

CIFAR100::CIFAR100(const std::filesystem::path& folder, Split split, const ImageTransforms& transforms)
    : ImageDataset(read_files(kHundred, folder, {split == Split::kTrain ? "train.bin" : "test.bin"}), transforms) {}

}  // namespace lockstep
