#include "lockstep/train/builtin.h"

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/data/fashion_mnist.h"
#include "lockstep/model/lenet.h"

namespace lockstep {
namespace {

Datasets fashion_mnist(const std::string& folder) {
  const std::string from = folder.empty() ? FashionMNIST::kDebianFolder : folder;
  return {.train = std::make_shared<FashionMNIST>(from, Split::kTrain),
          .validation = std::make_shared<FashionMNIST>(from, Split::kValidation)};
}

struct Model {
  const char* name;
  Task (*make)(std::string name);
};
constexpr Model kModels[] = {{"lenet", classification_task<LeNet>}};

struct Data {
  const char* name;
  Datasets (*load)(const std::string& folder);
};
constexpr Data kDatasets[] = {{"fashion-mnist", fashion_mnist}};

template <class Entries>
std::vector<std::string> names_of(const Entries& entries) {
  std::vector<std::string> names;
  for (const auto& entry : entries) names.emplace_back(entry.name);
  return names;
}

template <class Entries>
const auto& find_entry(const Entries& entries, const std::string& name, const std::string& option) {
  for (const auto& entry : entries)
    if (name == entry.name) return entry;
  throw UsageError({.what = concat("no such value for ", option, ": ", name),
                    .next = concat("one of: ", join(names_of(entries), ", "))});
}

}  // namespace

std::vector<std::string> model_names() { return names_of(kModels); }
std::vector<std::string> dataset_names() { return names_of(kDatasets); }

Task builtin_task(const std::string& model) { return find_entry(kModels, model, "--model").make(model); }

Datasets builtin_datasets(const TrainOptions& options) {
  return find_entry(kDatasets, options.data, "--data").load(options.data_dir);
}

}  // namespace lockstep
