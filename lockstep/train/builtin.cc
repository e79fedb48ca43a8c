#include "lockstep/train/builtin.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/data/fashion_mnist.h"
#include "lockstep/model/models.h"

namespace lockstep {
namespace {

// Noise of a task's shape, the same in every run: for measuring a model that has no dataset here.
class SyntheticData : public Dataset {
 public:
  SyntheticData(const SampleShape& shape, std::int64_t size, std::uint64_t seed) : size_(size) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
    std::vector<std::int64_t> sizes = {kDistinct};
    sizes.insert(sizes.end(), shape.sizes.begin(), shape.sizes.end());
    data_ = shape.tokens ? torch::randint(0, shape.classes, sizes, generator, torch::kInt64)
                         : torch::randn(sizes, generator, torch::kFloat32);
    target_ = torch::randint(0, shape.classes, shape.tokens ? sizes : std::vector<std::int64_t>{kDistinct}, generator,
                             torch::kInt64);
  }
  std::string name() const override { return "synthetic"; }
  std::int64_t size() const override { return size_; }
  Batch make_batch(std::span<const std::int64_t> indices) const override {
    std::vector<std::int64_t> places;
    for (const std::int64_t index : indices) places.push_back(index % kDistinct);
    const torch::Tensor index = torch::tensor(places, torch::kInt64);
    return {data_.index_select(0, index), target_.index_select(0, index)};
  }

 private:
  static constexpr std::int64_t kDistinct = 64;
  std::int64_t size_;
  torch::Tensor data_;
  torch::Tensor target_;
};

void require_shape(const Task& task, const std::vector<std::int64_t>& sizes, const std::string& data) {
  if (task.sample.sizes.empty() || (task.sample.sizes == sizes && !task.sample.tokens)) return;
  throw UsageError({.what = concat(task.name, " takes samples of shape ", torch::IntArrayRef(task.sample.sizes),
                                   ", but those of ", data, " have ", torch::IntArrayRef(sizes)),
                    .next = "--data synthetic makes samples that fit, or choose another --model"});
}

const std::vector<std::int64_t> kFashionMNISTSample = {1, 28, 28};

Datasets fashion_mnist(const Task& task, const std::string& folder) {
  require_shape(task, kFashionMNISTSample, "fashion-mnist");
  const std::string from = folder.empty() ? FashionMNIST::kDebianFolder : folder;
  return {.train = std::make_shared<FashionMNIST>(from, Split::kTrain),
          .validation = std::make_shared<FashionMNIST>(from, Split::kValidation)};
}

Datasets synthetic(const Task& task, const std::string&) {
  if (task.sample.sizes.empty())
    throw UsageError({.what = concat("--data synthetic, but ", task.name, " does not say what its samples look like"),
                      .next = "set Task::sample"});
  return {.train = std::make_shared<SyntheticData>(task.sample, 1280, 1), .validation = nullptr};
}

Datasets suitable(const Task& task, const std::string& folder) {
  const bool grey = task.sample.sizes.empty() || task.sample.sizes == kFashionMNISTSample;
  return grey ? fashion_mnist(task, folder) : synthetic(task, folder);
}

struct Data {
  const char* name;
  Datasets (*load)(const Task& task, const std::string& folder);
};
constexpr Data kDatasets[] = {{"auto", suitable}, {"fashion-mnist", fashion_mnist}, {"synthetic", synthetic}};

}  // namespace

std::vector<std::string> dataset_names() {
  std::vector<std::string> names;
  for (const Data& data : kDatasets) names.emplace_back(data.name);
  return names;
}

Datasets builtin_datasets(const TrainOptions& options, const Task& task) {
  for (const Data& data : kDatasets)
    if (options.data == data.name) return data.load(task, options.data_dir);
  throw UsageError({.what = concat("no such value for --data: ", options.data),
                    .next = concat("one of: ", join(dataset_names(), ", "))});
}

}  // namespace lockstep
