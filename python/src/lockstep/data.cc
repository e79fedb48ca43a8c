// SPDX-License-Identifier: Apache-2.0
// lockstep/_C.data: what data.py is made of. It has the documentation; here nothing is checked that C++ checks itself.

#include <mutex>
#include <optional>

#include "agent/clusters/environment.h"
#include "bindings.h"
#include "lockstep/base/text.h"
#include "lockstep/data/formats/readers.h"
#include "lockstep/data/loader/prefetch.h"
#include "lockstep/datasets.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/images.h"
#include "lockstep/loader.h"
#include "lockstep/sampler.h"

namespace lockstep::python {
namespace {

namespace fs = std::filesystem;
using Tensors = std::pair<torch::Tensor, torch::Tensor>;  // data, target

struct SharedDataset {
  std::shared_ptr<const Dataset> dataset;
};

SharedDataset with_transform(std::shared_ptr<const ImageSource> source, const std::string& transform,
                             const ImageTransforms& usual = {}) {
  return {std::make_shared<ImageDataset>(std::move(source), parse_transforms(transform, usual))};
}

SharedDataset images_of_split(const std::string& kind, const fs::path& folder, bool train,
                              const std::string& transform) {
  const SplitImages& images = split_images(kind);
  return with_transform(images.read(kind, folder, train ? Split::kTrain : Split::kValidation), transform,
                        images.normalised());
}

std::pair<SharedDataset, std::vector<std::string>> image_folder(const fs::path& folder, const std::string& transform,
                                                                const std::vector<std::string>& classes) {
  const auto source = std::make_shared<ImageFolder>(folder, classes);
  return {with_transform(source, transform, photographs()), source->class_names()};
}

SharedDataset tensors(const std::string& name, const torch::Tensor& data, const torch::Tensor& target, int64_t classes,
                      const std::string& transform) {
  if (const auto images = images_in(name, data, target, classes, name)) return with_transform(images, transform);
  if (!transform.empty())
    throw UsageError({.what = concat("transform is for images, ", name, " has none"),
                      .likely = "data of another dtype or shape",
                      .next = "leave transform out"});
  return {std::make_shared<TensorDataset>(name, data, target)};
}

SharedDataset tokens(const fs::path& path, int64_t block, int bits, int64_t vocabulary, double skip, double leave) {
  return {std::make_shared<TokenDataset>(path, TokenOptions{.block = block,
                                                            .token_bytes = bytes_of_token(bits),
                                                            .vocabulary = vocabulary,
                                                            .skip = skip,
                                                            .leave = leave})};
}

std::pair<SharedDataset, std::optional<SharedDataset>> open_by_name(const std::string& data, const std::string& folder,
                                                                    const std::string& transform) {
  Datasets both = open_dataset({.data = data, .folder = folder, .augment = transform});
  if (!both.validation) return {{std::move(both.train)}, std::nullopt};
  return {{std::move(both.train)}, SharedDataset{std::move(both.validation)}};
}

Tensors batch_of(const SharedDataset& from, const std::vector<int64_t>& indices) {
  const Batch batch = from.dataset->make_batch(indices);
  return {batch.data, batch.target};
}

// Ctrl-C ends a wait for a batch.
void look_for_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// A Loader for Python's threads: two that use it at the same time get an error.
class SharedLoader {
 public:
  SharedLoader(const SharedDataset& from, int rank, int ranks, const LoaderOptions& options,
               const torch::Device& device)
      : loader_(std::in_place, LoaderPlace{.rank = rank, .ranks = ranks, .device = device}, from.dataset, options) {}
  ~SharedLoader() {
    const py::gil_scoped_release others_run;  // it waits for the workers
    at_.reset();
    loader_.reset();
  }
  SharedLoader& operator=(SharedLoader&&) = delete;

  void start(int64_t epoch, int64_t samples) {
    const auto lock = this_thread_only();
    at_.reset();
    loader_->stop();
    from_ = {epoch, samples};
  }

  Tensors next() {
    const auto lock = this_thread_only();
    if (at_)
      ++*at_;
    else
      at_.emplace(loader_->resume(from_).begin());
    const Batch batch = std::move(**at_);
    return {batch.data, batch.target};
  }

  // Does nothing while another thread waits for a batch.
  void stop() {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) return;
    at_.reset();
    loader_->stop();
  }

  py::dict statistics() const {
    const LoadingStatistics& found = loader_->statistics();
    return py::dict(py::arg("batches") = found.batches, py::arg("samples") = found.samples,
                    py::arg("skipped") = found.skipped, py::arg("wait") = found.wait, py::arg("read") = found.read,
                    py::arg("assemble") = found.assemble, py::arg("copy") = found.copy, py::arg("room") = found.room,
                    py::arg("mean_queued") = found.mean_queued());
  }

 private:
  std::unique_lock<std::mutex> this_thread_only() {
    std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock)
      throw UsageError({.what = "another thread waits for a batch of this DataLoader",
                        .likely = "two threads iterate over it",
                        .next = "give each thread a DataLoader of its own"});
    return lock;
  }

  std::optional<Loader> loader_;
  LoaderPosition from_;
  std::optional<Loader::Iterator> at_;  // none before the first batch
  std::mutex mutex_;
};

std::shared_ptr<const SampleOrder> drawn_by(const std::optional<std::vector<double>>& weights, int64_t samples) {
  if (!weights) return nullptr;
  if (std::ssize(*weights) != samples)
    throw UsageError(
        {.what = concat(weights->size(), " weights for ", samples, " samples"), .next = "give one weight per sample"});
  return weighted_order(*weights, samples);
}

// The arguments of a DataLoader that do not depend on the rank.
LoaderOptions loader_options(const SharedDataset& from, int64_t batch_size, bool shuffle,
                             const std::optional<std::vector<double>>& weights, uint64_t seed, int num_workers,
                             int prefetch, int64_t skip_bad, double timeout) {
  using Seconds = std::chrono::duration<double>;
  if (!(timeout > 0 && Seconds(timeout) <= Seconds(Deadline::kLongest)))
    throw UsageError({.what = concat("timeout=", timeout), .next = "give seconds above 0, at most 24 days"});
  LoaderOptions options{.batch_size = batch_size,
                        .seed = seed,
                        .shuffle = shuffle,
                        .workers = num_workers,
                        .prefetch = prefetch,
                        .skip_bad = skip_bad,
                        .order = drawn_by(weights, from.dataset->size()),
                        .timeout = std::chrono::duration_cast<std::chrono::milliseconds>(Seconds(timeout)),
                        .while_waiting = look_for_signals};
  check_loader(options);
  return options;
}

// This rank's samples of the rest of an epoch, which is dealt in blocks of one sample per rank.
std::vector<int64_t> samples_of_rank(int64_t samples, int rank, int ranks, uint64_t seed, bool shuffle, int64_t epoch,
                                     int64_t first_sample) {
  DistributedSampler sampler(
      {.samples = samples, .batch_size = ranks, .rank = rank, .ranks = ranks, .seed = seed, .shuffle = shuffle});
  sampler.set_epoch(epoch, first_sample);
  std::vector<int64_t> mine;
  for (int64_t step = 0; step < sampler.steps(); ++step)
    for (const int64_t sample : sampler.part(step)) mine.push_back(sample);
  return mine;
}

std::pair<int, int> rank_of_job() {
  const JobEnvironment job = read_job_environment();
  return {job.rank, job.world_size};
}

void bind_datasets(py::module_& data) {
  py::class_<SharedDataset>(data, "Dataset")
      .def("__len__", [](const SharedDataset& from) { return from.dataset->size(); })
      .def("name", [](const SharedDataset& from) { return from.dataset->name(); })
      .def("batch", &batch_of, Release())
      .def("part", [](const SharedDataset& from, int64_t begin, int64_t end) {
        return SharedDataset{std::make_shared<SubsetDataset>(from.dataset, begin, end)};
      });
  data.def("split_images", &images_of_split, Release());
  data.def("image_folder", &image_folder, Release());
  data.def("tensors", &tensors, Release());
  data.def("tokens", &tokens, Release());
  data.def("open", &open_by_name, Release());
}

void bind_loader(py::module_& data) {
  const LoaderOptions usual;
  py::class_<LoaderOptions>(data, "LoaderOptions")
      .def(py::init(&loader_options), py::arg("dataset"), py::arg("batch_size"), py::arg("shuffle"), py::arg("weights"),
           py::arg("seed") = usual.seed, py::arg("num_workers") = usual.workers, py::arg("prefetch") = usual.prefetch,
           py::arg("skip_bad") = usual.skip_bad,
           py::arg("timeout") = std::chrono::duration<double>(usual.timeout).count())
      .def_readwrite("batch_size", &LoaderOptions::batch_size)
      .def_readonly("seed", &LoaderOptions::seed);
  py::class_<SharedLoader>(data, "Loader")
      .def(py::init<const SharedDataset&, int, int, const LoaderOptions&, const torch::Device&>(), Release())
      .def("start", &SharedLoader::start, Release())
      .def("next", &SharedLoader::next, Release())
      .def("stop", &SharedLoader::stop, Release())
      .def("statistics", &SharedLoader::statistics);
  data.def("samples_of_rank", &samples_of_rank, Release());
}

}  // namespace

void bind_data(py::module_& module) {
  py::module_ data = module.def_submodule("data");
  bind_datasets(data);
  bind_loader(data);
  data.def("rank_of_job", &rank_of_job);
}

}  // namespace lockstep::python
