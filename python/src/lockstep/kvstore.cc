// SPDX-License-Identifier: Apache-2.0
#include "lockstep/kvstore.h"

#include <mutex>
#include <stdexcept>

#include "bindings.h"
#include "lockstep/error.h"
#include "lockstep/strategy/option_names.h"

namespace lockstep::python {
namespace {

// A store, and the devices that push to it.
class OpenStore {
 public:
  OpenStore(std::unique_ptr<Devices> devices, std::unique_ptr<KVStore> store)
      : devices_(std::move(devices)), store_(std::move(store)) {}
  ~OpenStore() {
    const py::gil_scoped_release others_run;
    close(false);
  }
  OpenStore& operator=(OpenStore&&) = delete;

  // A worker that has failed throws: servers then notice its loss, where a goodbye would tell them that it has finished.
  void close(bool failed) try {
    const std::lock_guard lock(mutex_);
    const auto closing = std::move(store_);
    if (failed) throw std::runtime_error("failed");
  } catch (const std::runtime_error&) {
  }

  // Calls work(store), one thread at a time.
  auto use(const auto& work) const {
    const std::lock_guard lock(mutex_);
    if (!store_) throw UsageError({.what = "a call of a KVStore that was closed", .next = "make another one"});
    return work(*store_);
  }

 private:
  mutable std::mutex mutex_;
  std::unique_ptr<Devices> devices_;
  std::unique_ptr<KVStore> store_;
};

// None on a server, once all workers have gone.
std::unique_ptr<OpenStore> create(const std::string& kind, const World& world, int servers, int64_t staleness,
                                  bool adapt_to_delay, int64_t split_above, int devices) {
  const KVStoreOptions store{.kind = value_named<KVStoreKind>(kind, "kvstore"),
                             .servers = servers,
                             .staleness = staleness,
                             .adapt_to_delay = adapt_to_delay,
                             .split_above = split_above};
  std::unique_ptr<Devices> threads;
  if (devices > 0) threads = std::make_unique<Devices>(DevicesOptions{.count = devices, .timeout = world.timeout()});
  auto made = KVStore::create(world, {.timeout = world.timeout(), .kvstore = store}, threads.get());
  return made ? std::make_unique<OpenStore>(std::move(threads), std::move(made)) : nullptr;
}

// A method of the store.
template <class Result, class... Arguments>
auto of_store(Result (KVStore::*method)(Arguments...)) {
  return [method](const OpenStore& open, Arguments... arguments) {
    return open.use([&](KVStore& store) { return (store.*method)(arguments...); });
  };
}

py::cpp_function number(int (KVStore::*property)() const) {
  const auto of = [property](const OpenStore& open) {
    return open.use([property](const KVStore& store) { return (store.*property)(); });
  };
  return {of, Release()};
}

}  // namespace

void bind_kvstore(py::module_& module) {
  py::class_<NamedTensor>(module, "NamedTensor").def(py::init<std::string, torch::Tensor>());
  py::class_<PushOptions>(module, "PushOptions").def(py::init<int64_t, double, double>());
  py::class_<OpenStore>(module, "KVStore")
      .def_static("create", &create, Release())
      .def("close", &OpenStore::close, Release())
      .def("init", of_store(&KVStore::init), Release())
      .def(
          "set_optimizer",
          [](const OpenStore& open, const std::string& name, const OptionValues& values) {
            open.use([&](KVStore& store) { store.set_optimizer({.optimizer = optimizer_options(name, values)}); });
          },
          Release())
      .def("push", of_store(&KVStore::push), Release())
      .def("pull", of_store(&KVStore::pull), Release())
      .def("push_pull", of_store(&KVStore::push_pull), Release())
      .def("row_sparse_pull", of_store(&KVStore::row_sparse_pull), Release())
      .def_property_readonly("rank", number(&KVStore::rank))
      .def_property_readonly("workers", number(&KVStore::workers))
      .def("barrier", of_store(&KVStore::barrier), Release())
      .def(
          "delays",
          [](const OpenStore& open) {
            const Delays found = open.use([](KVStore& store) { return store.delays(); });
            return std::pair(found.mean, found.max);
          },
          Release());
}

}  // namespace lockstep::python
