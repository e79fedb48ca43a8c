// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/use_model.h"

#include <filesystem>
#include <iomanip>
#include <iostream>
#include <limits>
#include <optional>
#include <utility>

#include "lockstep/base/files/file.h"
#include "lockstep/base/require.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/data/formats/readers.h"
#include "lockstep/error.h"
#include "lockstep/train/builtin.h"
#include "lockstep/train/evaluate.h"
#include "lockstep/train/reports/metrics.h"
#include "lockstep/train/state/snapshot.h"

namespace lockstep {
namespace {

// --from-step, else the best one that a run with --keep-best has, else the newest.
LoadedCheckpoint checkpoint_to_use(const TrainOptions& options) {
  const std::string& path = options.checkpoint_dir;
  if (options.from_step > 0) return find_checkpoint(path, options.from_step);
  LoadedCheckpoint newest = find_checkpoint(path);  // an older one, if the newest is damaged
  const Position position = saved_run(newest.file.metadata()).position;
  const bool has_better = position.best_step >= 0 && position.best_step != position.step;
  return has_better && !std::filesystem::is_regular_file(path) ? find_checkpoint(path, position.best_step) : newest;
}

// The data that was asked for, else that of the training.
Datasets data_to_use(TrainOptions& options, const SavedRun& run, const Fit& fit, const Task& task) {
  const bool is_other = options.source.data != "auto" || options.use == Use::kPredict;
  if (options.source.data == "auto" && run.settings.contains("data")) options.source.data = run.settings["data"];
  if (is_other) options.source.trained_on = fit.data;
  Datasets data = load_datasets(options.source, task);
  if (!is_other && data.facts != fit.data)
    throw DataError({.what = concat("the data of ", options.source.data, " has changed since the training"),
                     .likely = "files that were added, removed or rewritten: other samples would be held out",
                     .next = "name data that the model has not seen: --data"});
  return data;
}

void require_samples(const Dataset& dataset, const Task& task, bool needs_targets) {
  const Batch sample = first_sample(dataset);
  if (!sample.data.defined()) return;
  const auto sizes = sample.data.sizes().slice(1);
  if (!task.sample.sizes.empty() && !task.sample.tokens && sizes != torch::IntArrayRef(task.sample.sizes))
    throw DataError(
        {.what = concat("samples of shape ", sizes, " for a model of ", torch::IntArrayRef(task.sample.sizes)),
         .here = dataset.name(),
         .next = "give it data of the kind that it was trained on"});
  const bool are_unknown = !sample.target.is_floating_point() && sample.target.dim() == 1 && dataset.classes() == 0;
  if (needs_targets && are_unknown && task.sample.classes + task.sample.numbers > 0)
    throw DataError({.what = "the samples have no targets to compare with",
                     .here = dataset.name(),
                     .next = "lockstep predict writes the model's outputs for them"});
}

std::string name_of_class(const DataFacts& facts, int64_t i) {
  return facts.classes.empty() ? concat(i) : facts.classes[to_size(i)];
}

// "-": no sample was taken for the class, or it has none.
std::string share(const Tensor& part, const Tensor& whole) {
  const double all = whole.item<double>();
  return all == 0 ? "-" : fixed(part.item<double>() / all, 4);
}

// Samples, precision and recall of each class.
std::string class_table(const Tensor& matrix, const DataFacts& facts) {
  const auto row = [](const std::string& name, const auto& samples, const std::string& precision,
                      const std::string& recall) {
    return concat("  ", std::left, std::setw(24), name, std::right, std::setw(10), samples, std::setw(12), precision,
                  std::setw(10), recall, '\n');
  };
  std::string table = row("class", "samples", "precision", "recall");
  const Tensor samples = matrix.sum(1), taken = matrix.sum(0), right = matrix.diag();
  for (int64_t i = 0; i < matrix.size(0); ++i)
    table += row(name_of_class(facts, i), samples[i].item<int64_t>(), share(right[i], taken[i]),
                 share(right[i], samples[i]));
  return table;
}

void print(const Evaluation& found, const DataFacts& facts, bool tokens) {
  constexpr int64_t kMostClasses = 100;
  const auto line = [](const std::string& name, double value) {
    std::cout << concat("  ", std::left, std::setw(24), name, std::right, std::setw(10), fixed(value, 4), '\n');
  };
  line("loss", found.loss);
  if (tokens) line("perplexity", std::exp(found.loss));
  if (!std::isnan(found.accuracy)) line("accuracy", found.accuracy);
  for (const auto& [name, figure] : found.metrics)
    if (figure.dim() == 0) line(name, figure.item<double>());
  const auto matrix = found.metrics.find("confusion_matrix");
  if (matrix != found.metrics.end() && matrix->second.size(0) <= kMostClasses)
    std::cout << class_table(matrix->second, facts);
  std::cout << std::flush;
}

void evaluate_model(const World& world, const TrainOptions& options, const Task& task, torch::nn::Module& model,
                    const DatasetPtr& dataset, const SavedRun& run, const DataFacts& facts) {
  LoaderOptions loading = options.loader;
  loading.batch_size = std::max(loading.batch_size / world.size(), int64_t{1});
  const Evaluation found = evaluate(world, task, model, dataset, loading);
  if (world.rank() != 0) return;
  std::cout << concat(options.model, " after step ", run.position.step, " on ", dataset->name(), ": ", found.samples,
                      " samples\n");
  print(found, facts, task.sample.tokens);
  if (options.metrics.empty()) return;
  Json event = {{"event", "eval"},
                {"model", options.model},
                {"data", options.source.data},
                {"step", run.position.step},
                {"samples", found.samples}};
  add_evaluation(event, "", found);
  if (task.sample.tokens) event["perplexity"] = std::exp(found.loss);
  if (!facts.classes.empty()) event["classes"] = facts.classes;
  MetricsFile metrics(options.metrics, /*append=*/true);
  metrics.write(event);
  metrics.require_written();
}

// ---- Predictions

std::string digits_of(float value) {
  return concat(std::setprecision(std::numeric_limits<float>::max_digits10), value);
}

// A field of a table (RFC 4180).
std::string csv_field(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? "\"\"" : std::string(1, c);
  return quoted + '"';
}

// The file that `predict` writes: as NumPy's .npy the model's outputs; as .csv a line per sample. It is there, whole, after
// finish().
class PredictionFile {
 public:
  // classes: the number of the model's classes, and their names, if they have any; 0: its outputs are numbers. Throws SystemError.
  PredictionFile(const std::string& path, int64_t samples, int64_t classes, std::vector<std::string> names)
      : file_(path),
        is_array_(path.ends_with(".npy")),
        samples_(samples),
        classes_(classes),
        names_(std::move(names)) {}

  // The outputs (B, ...) of the next samples, on the CPU. Throws UsageError: outputs that a table can't have; SystemError.
  void add(const Tensor& outputs) {
    const Tensor rows = outputs.to(torch::kFloat32).contiguous();
    is_array_ ? add_array(rows) : add_lines(rows.dim() == 1 ? rows.unsqueeze(1) : rows);
    written_ += rows.size(0);
  }
  void finish() { file_.commit(); }

 private:
  void add_array(const Tensor& outputs);
  void add_lines(const Tensor& outputs);

  AtomicFile file_;
  bool is_array_;
  int64_t samples_;
  int64_t classes_;
  std::vector<std::string> names_;
  int64_t written_ = 0;
};

void PredictionFile::add_array(const Tensor& outputs) {
  if (written_ == 0) {
    std::vector<int64_t> shape = outputs.sizes().vec();
    shape.front() = samples_;
    const std::string header = npy_header(torch::kFloat32, shape);
    file_.write(header.data(), header.size());
  }
  file_.write(outputs.const_data_ptr(), outputs.nbytes());
}

// The class and its probability, or the numbers.
void PredictionFile::add_lines(const Tensor& outputs) {
  require(outputs.dim() == 2, concat("outputs of shape ", outputs.sizes().slice(1), " for each sample in a .csv file"),
          "give --output a name that ends in .npy");
  std::string text;
  if (written_ == 0) {
    text = "sample";
    if (classes_ > 0) text += ",class,probability";
    for (int64_t i = 0; classes_ == 0 && i < outputs.size(1); ++i) text += concat(",output", i);
    text += '\n';
  }
  const auto [probability, best] = classes_ > 0 ? outputs.softmax(1).max(1) : std::tuple(outputs, outputs);
  for (int64_t row = 0; row < outputs.size(0); ++row) {
    text += concat(written_ + row);
    if (classes_ > 0) {
      const auto label = best[row].item<int64_t>();
      text += concat(',', names_.empty() ? concat(label) : csv_field(names_[to_size(label)]), ',',
                     digits_of(probability[row].item<float>()));
    } else {
      for (int64_t i = 0; i < outputs.size(1); ++i) text += ',' + digits_of(outputs[row][i].item<float>());
    }
    text += '\n';
  }
  file_.write(text.data(), text.size());
}

// Returns no outputs, but in the right shape, where a rank has no samples of a batch.
Tensor outputs_of(const Task& task, torch::nn::Module& model, const Batch& batch) {
  if (batch.size() > 0) return task.forward(model, batch).contiguous();
  const Batch one = batch.map([](const Tensor& none) {
    std::vector<int64_t> sizes = none.sizes().vec();
    sizes[0] = 1;
    return torch::zeros(sizes, none.options());
  });
  return task.forward(model, one).narrow(0, 0, 0);
}

void predict(const World& world, const TrainOptions& options, const Task& task, torch::nn::Module& model,
             const DatasetPtr& dataset, const DataFacts& facts) {
  const torch::NoGradGuard no_grad;
  model.eval();
  LoaderOptions loading = options.loader;
  loading.batch_size = std::max(loading.batch_size, static_cast<int64_t>(world.size()));
  loading.shuffle = false;
  loading.skip_bad = 0;  // each sample has its line
  Loader loader(world, dataset, loading);
  const bool in_classes = task.sample.classes > 0 && !task.sample.tokens;
  std::optional<PredictionFile> file;
  if (world.rank() == 0)
    file.emplace(options.output, dataset->size(), in_classes ? task.sample.classes : 0, facts.classes);
  for (const Batch& batch : loader.epoch(0)) {
    const Tensor all = world.all_gather_rows(outputs_of(task, model, batch));
    if (file) file->add(all.to(torch::kCPU));
  }
  if (!file) return;
  file->finish();
  std::cout << concat(options.output, ": ", dataset->size(), " samples of ", dataset->name(), '\n') << std::flush;
}

}  // namespace

void require_output(const TrainOptions& options) {
  if (options.use != Use::kPredict) return;
  require(options.output.ends_with(".csv") || options.output.ends_with(".npy"), concat("--output ", options.output),
          "give a file name that ends in .csv or .npy");
  require(!std::filesystem::exists(std::filesystem::symlink_status(options.output)),
          concat(options.output, " already exists"), "remove it, or name another --output");
}

void use_model(const World& world, TrainOptions options, const std::function<Task(const TrainOptions&)>& make_task) {
  std::optional<LoadedCheckpoint> found;
  if (world.rank() == 0) found = checkpoint_to_use(options);
  const SavedState saved = share_checkpoint(world, std::move(found)).value();
  const SavedRun run = saved_run(saved.metadata);
  const Fit fit = fit_of(run.fit);
  options.model = run.settings.value("model", options.model);
  Task task = make_task(options);
  if (task.fit) task = fitted_as(task, fit.sample);
  task = with_named_targets(std::move(task));
  const Datasets data = data_to_use(options, run, fit, task);
  const auto& dataset = data.validation ? data.validation : data.train;
  require_samples(*dataset, task, options.use == Use::kEval);
  const ModulePtr model = task.make_model();
  restore_model(saved, *model);
  model->to(world.device());
  options.use == Use::kEval ? evaluate_model(world, options, task, *model, dataset, run, fit.data)
                            : predict(world, options, task, *model, dataset, fit.data);
}

}  // namespace lockstep
