// SPDX-License-Identifier: Apache-2.0
#include "lockstep/gradient/gradient_memory.h"

#include <atomic>
#include <bit>
#include <cstring>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include "lockstep/base/own_process.h"
#include "lockstep/base/page_guard.h"

namespace lockstep {
namespace {

// Bytes. Gradients to guard lie in pages of their own, small ones too.
std::size_t smallest() { return check_interval() > 0 ? 1 : 16 << 10; }

// Where a gradient of `bytes` bytes has pages of its own, if that is wanted.
SharedMemory::Own on_own_pages(SharedMemory::Own memory) {
  std::byte* const begin = first_page(memory.data.get());
  const auto place = memory.place + static_cast<std::uint64_t>(begin - memory.data.get());
  return {{std::move(memory.data), begin}, place};
}

}  // namespace

// Blocks of shared memory, by size; a free block serves the next request of its size. Blocks of a size are as many as
// were in use at once, at most: nothing is given back before the pool is gone. A tensor may outlive its GradientMemory:
// the block then keeps the pool, and the pool keeps the memory.
class GradientMemory::Pool : public std::enable_shared_from_this<Pool> {
 public:
  Pool(std::shared_ptr<SharedMemory> memory, const std::vector<NamedTensor>& parameters) : memory_(std::move(memory)) {
    if (is_private()) return;
    for (const auto& [name, tensor] : parameters)
      if (tensor.requires_grad() && tensor.nbytes() >= smallest()) free_[tensor.nbytes()];
  }

  // One rank alone: nobody else reads its gradients, so any memory will do, unless they are to outlive it.
  bool is_private() const { return memory_->size() == 1 && !memory_->outlives_ranks() && check_interval() == 0; }

  // In a forked child neither memory nor blocks: its parent and the other ranks use the same ones.
  bool is_parents() const { return !process_.is_here(); }

  bool serves(std::size_t bytes) const { return bytes >= smallest() && free_.contains(bytes) && !is_parents(); }

  SharedMemory::Own take(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    auto& blocks = free_.at(bytes);
    if (blocks.empty()) {
      allocated_ += bytes;
      return on_own_pages(memory_->allocate(guarded_bytes(bytes)));
    }
    SharedMemory::Own block = std::move(blocks.back());
    blocks.pop_back();
    return block;
  }

  void give_back(SharedMemory::Own block, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    free_.at(bytes).push_back(std::move(block));
  }

  std::size_t allocated() const {
    const std::lock_guard lock(mutex_);
    return allocated_;
  }

 private:
  std::shared_ptr<SharedMemory> memory_;
  OwnProcess process_;
  mutable std::mutex mutex_;
  std::map<std::size_t, std::vector<SharedMemory::Own>> free_;  // its keys never change
  std::size_t allocated_ = 0;
};

namespace {

thread_local GradientMemory::Pool* active_pool = nullptr;

// The CPU allocator of the process once a GradientMemory was made; `base` is the one that it replaces. It knows the
// blocks that tensors hold at the moment, over all pools, by address: a deleter is given nothing but a pointer.
class PoolingAllocator : public c10::Allocator {
 public:
  static PoolingAllocator& installed() {
    static PoolingAllocator* const allocator = [] {  // never destroyed: tensors may be released after static objects
      auto* const made = new PoolingAllocator(c10::GetCPUAllocator());
      std::atomic_thread_fence(std::memory_order_release);  // torch stores the pointer, and other threads use it at once
      c10::SetCPUAllocator(made, /*priority=*/100);
      hold_during_fork<std::shared_mutex, &PoolingAllocator::mutex>();
      return made;
    }();
    return *allocator;
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    if (active_pool == nullptr || !active_pool->serves(bytes)) return base_->allocate(bytes);
    SharedMemory::Own memory = active_pool->take(bytes);
    void* const data = memory.data.get();
    const std::unique_lock lock(mutex_);
    in_use_.emplace(data, Block{std::move(memory), bytes, active_pool->shared_from_this()});
    return {data, data, &release, c10::Device(c10::kCPU)};
  }

  // oneDNN requires a raw deleter, and a DataPtr whose context is its data.
  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

  std::optional<std::uint64_t> place_of(const void* data, const GradientMemory::Pool* pool) const {
    const std::shared_lock lock(mutex_);
    const auto found = in_use_.find(data);
    if (found == in_use_.end() || found->second.pool.get() != pool) return std::nullopt;
    return found->second.memory.place;
  }

 private:
  static std::shared_mutex& mutex() { return installed().mutex_; }

  struct Block {
    SharedMemory::Own memory;
    std::size_t bytes;
    std::shared_ptr<GradientMemory::Pool> pool;
  };

  explicit PoolingAllocator(c10::Allocator* base) : base_(base) {}

  static void release(void* data) {
    PoolingAllocator& all = installed();
    std::unique_lock lock(all.mutex_);
    auto node = all.in_use_.extract(data);
    lock.unlock();
    if (node.empty()) return all.base_->raw_deleter()(data);
    Block& block = node.mapped();
    if (block.pool->is_parents()) return leave_to_parent(block);
    block.pool->give_back(std::move(block.memory), block.bytes);
  }

  c10::Allocator* base_;
  mutable std::shared_mutex mutex_;  // any thread may release a tensor
  std::unordered_map<const void*, Block> in_use_;
};

}  // namespace

GradientMemory::GradientMemory(std::shared_ptr<SharedMemory> memory, const std::vector<NamedTensor>& parameters)
    : pool_(std::make_shared<Pool>(std::move(memory), parameters)) {
  PoolingAllocator::installed();
}
GradientMemory::~GradientMemory() = default;

std::optional<std::uint64_t> GradientMemory::place_of(const torch::Tensor& tensor) const {
  if (pool_->is_private()) return std::bit_cast<std::uint64_t>(tensor.const_data_ptr());
  return PoolingAllocator::installed().place_of(tensor.const_data_ptr(), pool_.get());
}

std::size_t GradientMemory::bytes() const { return pool_->allocated(); }

GradientMemory::Scope::Scope(GradientMemory& memory) { active_pool = memory.pool_.get(); }
GradientMemory::Scope::~Scope() { active_pool = nullptr; }

}  // namespace lockstep
