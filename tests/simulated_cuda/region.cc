// SPDX-License-Identifier: Apache-2.0
#include "tests/simulated_cuda/region.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include "tests/simulated_cuda/simulator.h"

namespace simulated_cuda {
namespace {

constexpr size_t kGrain = 512;  // as the caching allocator of CUDA
constexpr size_t kWaiting = size_t{64} << 20;

size_t rounded(size_t bytes) { return (bytes + kGrain - 1) / kGrain * kGrain; }

char* map(size_t size, int protection, int file) {
  void* const at = ::mmap(nullptr, size, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
  TORCH_CHECK(at != MAP_FAILED, "lockstep simulator: no address space for ", size, " bytes of device memory");
  return static_cast<char*>(at);
}

}  // namespace

Region::Region(int device) : limit_(settings().memory), size_(4 * rounded(limit_) + kWaiting), owner_(::getpid()) {
  const int file = ::memfd_create(("cuda" + std::to_string(device)).c_str(), MFD_CLOEXEC);
  TORCH_CHECK(file >= 0 && ::ftruncate(file, static_cast<off_t>(size_)) == 0, "lockstep simulator: no memory file");
  seen_ = map(size_, PROT_NONE, file);
  real_ = map(size_, PROT_READ | PROT_WRITE, file);
  ::close(file);
  free_[0] = size_;
}

char* Region::take(size_t bytes) {
  TORCH_CHECK(owner_ == ::getpid(), "Cannot re-initialize CUDA in forked subprocess (simulated)");
  bytes = rounded(bytes);
  if (live_ + bytes > limit_) return nullptr;
  const auto fits = [&](const auto& hole) { return hole.second >= bytes; };
  auto hole = std::ranges::find_if(free_, fits);
  while (hole == free_.end() && !waiting_.empty()) {
    release_oldest();
    hole = std::ranges::find_if(free_, fits);
  }
  if (hole == free_.end()) return nullptr;
  const auto [offset, size] = *hole;
  free_.erase(hole);
  if (size > bytes) free_[offset + bytes] = size - bytes;
  live_ += bytes;
  std::memset(real_ + offset, 0xff, bytes);
  return seen_ + offset;
}

void Region::give_back(char* address, size_t bytes) {
  if (owner_ != ::getpid()) return;  // shared with the parent, which still uses it
  bytes = rounded(bytes);
  const auto offset = static_cast<size_t>(address - seen_);
  std::memset(real_ + offset, 0xff, bytes);
  live_ -= bytes;
  waiting_.emplace_back(offset, bytes);
  waiting_bytes_ += bytes;
  while (waiting_bytes_ > kWaiting) release_oldest();
}

void Region::release_oldest() {
  const auto [offset, bytes] = waiting_.front();
  waiting_.pop_front();
  waiting_bytes_ -= bytes;
  if (bytes >= size_t{1} << 20) ::madvise(real_ + offset, bytes, MADV_REMOVE);
  merge(offset, bytes);
}

void Region::merge(size_t offset, size_t bytes) {
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + bytes == next->first) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  free_[offset] = bytes;
}

}  // namespace simulated_cuda
