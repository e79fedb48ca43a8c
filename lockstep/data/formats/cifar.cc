// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/text.h"
#include "lockstep/data/formats/readers.h"

namespace lockstep {
namespace {

// Krizhevsky, "Learning multiple layers of features from tiny images", 2009: 50,000 + 10,000 colour images of 32 x 32.
// A record is the label (CIFAR-100: the coarse one of 20, then the fine one of 100) and 3072 bytes: the red, the green
// and the blue plane.
constexpr int64_t kPixels = int64_t{3} * 32 * 32;

// (records, bytes of a record)
Tensor records_in(const DataFile& file, int64_t record_bytes) {
  const auto bytes = static_cast<int64_t>(file.size());
  if (bytes == 0 || bytes % record_bytes != 0)
    throw DataError({.what = concat(file.path().filename().string(), " has ", bytes,
                                    " bytes, not a whole number of records of ", record_bytes),
                     .here = file.path().string(),
                     .likely = "an interrupted download, or the Python version of the dataset",
                     .next = "fetch the binary version"});
  Tensor records = torch::empty({bytes / record_bytes, record_bytes}, torch::kUInt8);
  file.read(0, {records.data_ptr<uint8_t>(), file.size()});
  return records;
}

std::vector<std::string> files_of(bool ten, Split split) {
  if (!ten) return {split == Split::kTrain ? "train.bin" : "test.bin"};
  if (split == Split::kValidation) return {"test_batch.bin"};
  return {"data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin", "data_batch_5.bin"};
}

}  // namespace

ImageSourcePtr read_cifar_files(const std::string& name, const fs::path& folder, Split split) {
  const bool ten = name == "cifar-10";
  const int64_t label_bytes = ten ? 1 : 2;
  Tensors pixels, labels;
  for (const std::string& file : files_of(ten, split)) {
    const Tensor records = records_in(DataFile(folder / file), label_bytes + kPixels);
    pixels.push_back(records.slice(1, label_bytes));
    labels.push_back(records.select(1, label_bytes - 1));
  }
  return std::make_shared<MemoryImages>(name, torch::cat(pixels).view({-1, 3, 32, 32}), torch::cat(labels),
                                        ten ? 10 : 100, folder.string());
}

}  // namespace lockstep
