// SPDX-License-Identifier: Apache-2.0
#include "lockstep/step/gradient_memory.h"

#include <atomic>
#include <bit>
#include <cstring>
#include <shared_mutex>
#include <unordered_map>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include "lockstep/base/process/page_guard.h"

namespace lockstep {
namespace {

// Bytes. Gradients to guard lie in pages of their own, small ones too.
size_t smallest() { return check_interval() > 0 ? 1 : 16 << 10; }

// Returns the part of `memory` that has pages of its own, if gradients are guarded.
SharedMemory::Own on_own_pages(SharedMemory::Own memory) {
  std::byte* const begin = first_page(memory.data.get());
  const auto place = memory.place + static_cast<uint64_t>(begin - memory.data.get());
  return {{std::move(memory.data), begin}, place};
}

thread_local GradientMemory* active = nullptr;

// The CPU allocator of the process once a GradientMemory was made; `base` is the one that it replaces. It knows the
// blocks that tensors hold, of every GradientMemory, by address: a deleter is given nothing but a pointer.
class PoolingAllocator : public c10::Allocator {
 public:
  static PoolingAllocator& installed() {
    static PoolingAllocator* const allocator = [] {  // never destroyed: tensors may be released after static objects
      auto* const made = new PoolingAllocator(c10::GetCPUAllocator());
      // Torch stores the pointer without a fence, and other threads use it at once.
      std::atomic_thread_fence(std::memory_order_release);
      c10::SetCPUAllocator(made, /*priority=*/100);
      hold_during_fork<std::shared_mutex, &PoolingAllocator::mutex>();
      return made;
    }();
    return *allocator;
  }

  c10::DataPtr allocate(size_t bytes) override {
    if (active == nullptr || !active->serves(bytes)) return base_->allocate(bytes);
    SharedMemory::Own memory = active->take(bytes);
    void* const data = memory.data.get();
    const std::unique_lock lock(mutex_);
    in_use_.emplace(data, Block{std::move(memory), bytes, active->shared_from_this()});
    return {data, data, &release, c10::Device(c10::kCPU)};
  }

  // oneDNN requires a raw deleter, and a DataPtr whose context is its data.
  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

  std::optional<uint64_t> place_of(const void* data, const GradientMemory* owner) const {
    const std::shared_lock lock(mutex_);
    const auto found = in_use_.find(data);
    if (found == in_use_.end() || found->second.owner.get() != owner) return std::nullopt;
    return found->second.memory.place;
  }

 private:
  static std::shared_mutex& mutex() { return installed().mutex_; }

  struct Block {
    SharedMemory::Own memory;
    size_t bytes;
    std::shared_ptr<GradientMemory> owner;
  };

  explicit PoolingAllocator(c10::Allocator* base) : base_(base) {}

  static void release(void* data) {
    PoolingAllocator& all = installed();
    std::unique_lock lock(all.mutex_);
    auto node = all.in_use_.extract(data);
    lock.unlock();
    if (node.empty()) return all.base_->raw_deleter()(data);
    Block& block = node.mapped();
    if (block.owner->is_parents()) return leave_to_parent(block);
    block.owner->give_back(std::move(block.memory), block.bytes);
  }

  c10::Allocator* base_;
  mutable std::shared_mutex mutex_;  // any thread may release a tensor
  std::unordered_map<const void*, Block> in_use_;
};

}  // namespace

GradientMemory::GradientMemory(SharedMemoryPtr memory, const NamedTensors& parameters) : memory_(std::move(memory)) {
  PoolingAllocator::installed();
  if (is_private()) return;
  for (const auto& [name, tensor] : parameters)
    if (tensor.requires_grad() && tensor.nbytes() >= smallest()) free_[tensor.nbytes()];
}

// One rank alone: nobody else reads its gradients, so any memory will do, unless they are to outlive it.
bool GradientMemory::is_private() const {
  return memory_->size() == 1 && !memory_->outlives_ranks() && check_interval() == 0;
}

SharedMemory::Own GradientMemory::take(size_t bytes) {
  const std::lock_guard lock(mutex_);
  auto& blocks = free_.at(bytes);
  if (blocks.empty()) return on_own_pages(memory_->allocate(guarded_bytes(bytes)));
  SharedMemory::Own block = std::move(blocks.back());
  blocks.pop_back();
  return block;
}

void GradientMemory::give_back(SharedMemory::Own block, size_t bytes) {
  const std::lock_guard lock(mutex_);
  free_.at(bytes).push_back(std::move(block));
}

std::optional<uint64_t> GradientMemory::place_of(const torch::Tensor& tensor) const {
  if (is_private()) return std::bit_cast<uint64_t>(tensor.const_data_ptr());
  return PoolingAllocator::installed().place_of(tensor.const_data_ptr(), this);
}

GradientMemory::Scope::Scope(GradientMemory& memory) { active = &memory; }
GradientMemory::Scope::~Scope() { active = nullptr; }

}  // namespace lockstep
