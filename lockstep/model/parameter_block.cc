// SPDX-License-Identifier: Apache-2.0
#include "lockstep/model/parameter_block.h"

#include <cstring>
#include <utility>

#include <c10/core/CPUAllocator.h>
#include <torch/csrc/autograd/variable.h>
#include <xxhash.h>

#include "lockstep/base/cache_line.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/model/samples.h"

namespace lockstep {
namespace {

size_t bytes_of(const NamedTensors& parameters) {
  size_t bytes = 0;
  for (const auto& [name, tensor] : parameters) bytes += round_up(tensor.nbytes(), kCacheLine);
  return bytes;
}

using Block = std::shared_ptr<std::byte>;
void release_block(void* block) { delete static_cast<Block*>(block); }

// A tensor like `parameter` at `place`, which keeps the block's memory. Its release_block() shows that it is in a block.
Tensor view_of_block(const Block& block, std::byte* place, const Tensor& parameter) {
  at::DataPtr data(place, new Block(block), &release_block, parameter.device());
  const c10::Storage storage(c10::Storage::use_byte_size_t(), parameter.nbytes(), std::move(data));
  return torch::empty({0}, parameter.options().requires_grad(false))
      .set_(storage, 0, parameter.sizes(), parameter.strides());
}

bool is_in_block(const Tensor& tensor) {
  return tensor.has_storage() && tensor.storage().data_ptr().get_deleter() == &release_block;
}

uint32_t version_of(const Tensor& tensor) {
  return static_cast<uint32_t>(tensor.unsafeGetTensorImpl()->version_counter().current_version());
}

UsageError moved(const std::string& name) {
  return UsageError(
      {.what = concat("parameter ", name, " has left the memory that the ranks of this machine share"),
       .likely = "Module::to(dtype), set_data or another DistributedDataParallel of the module",
       .next = "do that before, let go of the first DistributedDataParallel, or set share_parameters = false"});
}

UsageError written(const std::string& name) {
  return UsageError(
      {.what = concat("parameter ", name, " was written between two steps, while all ranks of this machine share it"),
       .likely = "an update by hand, an Embedding with max_norm (it writes in forward), Module::load, "
                 "load_state_dict(), or a second optimizer",
       .next = "write the same values on every rank within write_parameters() (instead of max_norm, renormalise the "
               "whole weight there), or set share_parameters = false"});
}

}  // namespace

ParameterBlock::ParameterBlock(SharedMemory& memory, NamedTensors parameters)
    : is_shared_(memory.size() > 1), is_first_(memory.rank() == 0) {
  for (const auto& [name, tensor] : parameters) static_cast<void>(dense_view(tensor));
  memory_ = memory.allocate_common(guarded_bytes(bytes_of(parameters)));
  std::byte* place = first_page(memory_.get());
  for (NamedTensor& parameter : parameters) {
    Tensor& tensor = parameter.tensor;
    const size_t bytes = tensor.nbytes();
    if (memory.rank() == 0 && bytes > 0) std::memcpy(place, tensor.const_data_ptr(), bytes);
    if (bytes > 0) tensor.set_data(view_of_block(memory_, place, tensor));
    entries_.push_back({std::move(parameter), place, 0, 0});
    place += round_up(bytes, kCacheLine);
  }
  memory.barrier();
  protect();
  Tensors tensors;
  for (const Entry& entry : entries_) tensors.push_back(entry.parameter.tensor);
  watch_.watch(tensors);
  mark_written();
}

void leave_block(const NamedTensors& parameters) {
  const torch::NoGradGuard no_grad;
  for (const auto& [name, tensor] : parameters)
    if (is_in_block(tensor)) Tensor(tensor).set_data(tensor.clone());
}

void ParameterBlock::leave() noexcept try {
  if (!is_shared_) return;
  guard_.reset();
  watch_.watch({});
  for (const Entry& entry : entries_)
    if (entry.parameter.tensor.const_data_ptr() == entry.place) leave_block({entry.parameter});
  memory_.reset();
} catch (const std::exception& error) {
  log_warning(concat("parameters stay in memory that the ranks of this machine share: ", first_line_of(error)));
}

uint64_t ParameterBlock::hash() const {
  uint64_t hash = 0;
  for (const Entry& entry : entries_) hash = XXH3_64bits_withSeed(entry.place, entry.parameter.tensor.nbytes(), hash);
  return hash;
}

ParameterBlock::Copies::Copies(ParameterBlock& block) : block_(block), hash_(block.hash()) {
  block.require_in_place();
  for (const auto& [parameter, place, version, samples] : block.entries_) {
    const size_t bytes = parameter.tensor.nbytes();
    if (bytes == 0) continue;
    copies_.push_back({parameter.tensor.storage(), c10::GetCPUAllocator()->allocate(bytes), place, bytes});
    std::memcpy(copies_.back().other.get(), place, bytes);
  }
  swap();
}

ParameterBlock::Copies::~Copies() {
  swap();
  if (is_accepted_) block_.mark_written();  // with the values of before
}

void ParameterBlock::Copies::swap() {
  for (Copy& copy : copies_) copy.other = copy.storage.set_data_ptr(std::move(copy.other));
}

void ParameterBlock::Copies::require_unseen() {
  if (block_.hash() == hash_) return;
  is_accepted_ = false;
  throw UsageError({.what = "write_parameters() has written parameters through a pointer that was taken before",
                    .likely = "numpy or another library with a view of a parameter: all ranks see such a write at once",
                    .next = "take the view inside the function, and let go of it there"});
}

void ParameterBlock::Copies::publish() {
  is_accepted_ = false;  // before all ranks have them
  if (!block_.is_first_) return;
  const ParameterWrite writing;
  for (const Copy& copy : copies_) std::memcpy(const_cast<std::byte*>(copy.place), copy.storage.data(), copy.bytes);
}

void ParameterBlock::protect() {
  if (check_interval() == 0 || entries_.empty()) return;
  std::vector<PageGuard::Part> parts;
  for (const Entry& entry : entries_)
    parts.push_back({entry.parameter.name, entry.place, entry.parameter.tensor.nbytes()});
  guard_.emplace(PageGuard::Kind::kParameters, parts);
}

void ParameterBlock::require_not_moved() const {
  for (const auto& [parameter, place, version, samples] : entries_)
    if (parameter.tensor.numel() > 0 && parameter.tensor.const_data_ptr() != place) throw moved(parameter.name);
}

void ParameterBlock::require_in_place() const {
  require_not_moved();
  if (const auto changed = written_by_hand()) throw written(entries_[*changed].parameter.name);
}

std::optional<size_t> ParameterBlock::written_by_hand() const {
  for (size_t i = 0; i < entries_.size(); ++i)
    if (entries_[i].parameter.tensor.numel() > 0 && version_of(entries_[i].parameter.tensor) != entries_[i].version)
      return i;
  return watch_.changed();
}

void ParameterBlock::require_same_samples() const {
  for (const auto& [parameter, place, version, samples] : entries_)
    if (hash_of_samples(parameter.tensor) != samples) throw written(parameter.name);
}

void ParameterBlock::mark_written() {
  for (auto& [parameter, place, version, samples] : entries_) {
    torch::autograd::impl::bump_version(parameter.tensor);
    version = version_of(parameter.tensor);
    samples = hash_of_samples(parameter.tensor);
  }
  watch_.accept();
}

}  // namespace lockstep
