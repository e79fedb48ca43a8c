#include "lockstep/train/builtin.h"

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/data/open_dataset.h"
#include "lockstep/model/lenet.h"

namespace lockstep {
namespace {

struct Model {
  const char* name;
  Task (*make)(std::string name);
};
constexpr Model kModels[] = {{"lenet", classification_task<LeNet>}};

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
std::vector<std::string> dataset_names() { return dataset_kinds(); }

Task builtin_task(const std::string& model) { return find_entry(kModels, model, "--model").make(model); }

Datasets builtin_datasets(const TrainOptions& options) {
  TrainAndValidation both = open_dataset({.data = options.data, .folder = options.data_dir, .augment = options.augment});
  return {.train = std::move(both.train), .validation = std::move(both.validation)};
}

}  // namespace lockstep
