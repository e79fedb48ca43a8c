// SPDX-License-Identifier: Apache-2.0
#include "tests/killed_update/workload.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <stdexcept>

#include "lockstep/base/text.h"
#include "lockstep/step/update/rule.h"

namespace lockstep::testing {
namespace {

constexpr size_t kGroups = 2;

// Some numbers in [-1, 1) that depend on nothing but these.
float number(uint64_t a, uint64_t b, uint64_t c, uint64_t i) {
  uint64_t x = a * 0x9E3779B97F4A7C15u + b * 0xBF58476D1CE4E5B9u + c * 0x94D049BB133111EBu + i + 1;
  for (int round = 0; round < 2; ++round) x = (x ^ (x >> 31)) * 0xD6E8FEB86659FD93u;
  return static_cast<float>(static_cast<int64_t>(x >> 40)) / 8388608.0f - 1.0f;
}

void fill(void* data, torch::ScalarType dtype, int64_t count, const auto& value) {
  for (int64_t i = 0; i < count; ++i) {
    if (dtype == torch::kFloat32) static_cast<float*>(data)[i] = value(i);
    if (dtype == torch::kFloat64) static_cast<double*>(data)[i] = value(i);
    if (dtype == torch::kBFloat16) static_cast<c10::BFloat16*>(data)[i] = value(i);
    if (dtype == torch::kFloat16) static_cast<c10::Half*>(data)[i] = value(i);
  }
}

}  // namespace

Workload::Workload(std::shared_ptr<SharedMemory> memory, const UpdateCase& given, bool kept)
    : memory_(std::move(memory)), case_(given), rule_(rule_of(given.options)) {
  int64_t elements = 0;
  for (const int64_t size : case_.sizes) elements += size + 64;
  const size_t each = c10::elementSize(case_.dtype);
  const auto block = memory_->allocate_common(static_cast<size_t>(elements) * each);
  std::byte* place = block.get();
  for (size_t i = 0; i < case_.sizes.size(); ++i) {
    const int64_t size = case_.sizes[i];
    if (memory_->rank() == 0) fill(place, case_.dtype, size, [&](int64_t e) { return number(1, i, 0, e); });
    state_.parameters.push_back(torch::from_blob(
        place, {size}, [block](void*) {}, torch::dtype(case_.dtype)));
    state_.group_of.push_back(i % kGroups);
    place += round_up<size_t>(static_cast<size_t>(size) * each, kCacheLine);
    gradients_.push_back(memory_->allocate(static_cast<size_t>(size) * each));
  }
  places_ = memory_->allocate_common(static_cast<size_t>(memory_->size()) * case_.sizes.size() * 8);
  for (size_t i = 0; i < case_.sizes.size(); ++i)
    reinterpret_cast<uint64_t*>(places_.get())[static_cast<size_t>(memory_->rank()) * case_.sizes.size() + i] =
        gradients_[i].place;
  state_.steps.resize(case_.sizes.size());
  state_.arrays.resize(rule_->state_names().size());
  state_.ema_decay = case_.ema_decay;
  memory_->barrier();
  const size_t sources = kept ? static_cast<size_t>(memory_->size()) : 0;
  flat_ = FlatUpdate::make(memory_, state_,
                           JournalOptions{.kept_sources = sources, .groups = kGroups, .layerwise = rule_->layerwise()});
}

void Workload::fill_gradients(int step) {
  const float scale = static_cast<float>(case_.loss_scale.value_or(1));
  for (size_t i = 0; i < case_.sizes.size(); ++i)
    fill(gradients_[i].data.get(), case_.dtype, case_.sizes[i], [&](int64_t e) {
      return scale * number(2 + static_cast<uint64_t>(step), i, static_cast<uint64_t>(memory_->rank()), e);
    });
  if (step == kSteps && case_.overflows)
    fill(gradients_[0].data.get(), case_.dtype, 1, [](auto) { return std::numeric_limits<float>::infinity(); });
  memory_->barrier();
}

// The second parameter has none on rank 0 in the last step where others have one, the last parameter none at all in the second.
const void* Workload::gradient_of(int step, size_t parameter, int rank) const {
  if (parameter == 1 && rank == 0 && step == kSteps && memory_->size() > 1) return nullptr;
  if (parameter + 1 == case_.sizes.size() && step == 2) return nullptr;
  const uint64_t place =
      reinterpret_cast<const uint64_t*>(places_.get())[static_cast<size_t>(rank) * case_.sizes.size() + parameter];
  return memory_->peer(rank, place, state_.parameters[parameter].nbytes());
}

// A schedule: what was set when a step was killed is not what was set before.
std::vector<UpdateRule::Group> Workload::groups_in(int step) const {
  std::vector<UpdateRule::Group> groups;
  std::visit(
      [&](auto values) {
        for (size_t group = 0; group < kGroups; ++group) {
          values.lr /= 1.0 + 0.25 * step + 0.5 * static_cast<double>(group);
          if (static_cast<int>(group) == case_.group_without && step > 1) {
            if constexpr (requires { values.momentum; }) values.momentum = 0;
            if constexpr (requires { values.nesterov; }) values.nesterov = false;
          }
          groups.push_back(parameter_group({}, values));
        }
      },
      case_.options);
  return groups;
}

void Workload::update(int step) {
  const auto groups = groups_in(step);
  WeightedGradients gradients;
  for (int rank = 0; rank < memory_->size(); ++rank) gradients.weights.push_back((rank + 1.0) / 7);
  for (size_t i = 0; i < case_.sizes.size(); ++i)
    for (int rank = 0; rank < memory_->size(); ++rank) gradients.pointers.push_back(gradient_of(step, i, rank));
  flat_->run({*rule_, groups, gradients, case_.clipping, case_.loss_scale});
}

std::string image_of(const OptimizerState& state) {
  std::string image;
  const auto add = [&](const torch::Tensor& tensor) {
    if (tensor.defined()) image.append(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
  };
  for (size_t i = 0; i < state.parameters.size(); ++i) {
    image.append(reinterpret_cast<const char*>(&state.steps[i]), sizeof state.steps[i]);
    add(state.parameters[i]);
    for (const auto& array : state.arrays) add(array[i]);
    if (!state.averages.empty()) add(state.averages[i]);
    if (!state.masters.empty()) add(state.masters[i]);
  }
  return image;
}

Arenas::Arenas(const std::vector<UniqueFd>& files) {
  for (const UniqueFd& file : files) {
    struct stat status {};
    ::fstat(file.get(), &status);
    const auto bytes = static_cast<size_t>(status.st_size);
    void* const data =
        bytes == 0 ? MAP_FAILED : ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
    if (data == MAP_FAILED)
      throw std::runtime_error(concat("an arena of ", bytes, " bytes can't be mapped, descriptor ", file.get()));
    mapped_.emplace_back(static_cast<std::byte*>(data), bytes);
  }
}

Arenas::~Arenas() {
  for (const auto& each : mapped_) ::munmap(each.data(), each.size());
}

std::byte* Arenas::find(const SharedMemory::ArenaOffset& place, size_t bytes) const {
  return mapped_.at(static_cast<size_t>(place.arena)).subspan(place.offset, bytes).data();
}

std::vector<UniqueFd> arenas_of(pid_t process, int ranks) {
  std::vector<UniqueFd> files(static_cast<size_t>(ranks));
  const std::string folder = concat("/proc/", process, "/fd");
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::error_code error;
    const std::string target = std::filesystem::read_symlink(entry.path(), error).string();
    for (int rank = 0; rank < ranks; ++rank)
      if (target.starts_with(concat("/memfd:lockstep the memory of rank ", rank, " ")))
        files[static_cast<size_t>(rank)] = UniqueFd(::open(entry.path().c_str(), O_RDWR | O_CLOEXEC));
  }
  return files;
}

}  // namespace lockstep::testing
