// SPDX-License-Identifier: Apache-2.0
#include "tests/simulated_cuda/host_memory.h"

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <string_view>

#include "tests/simulated_cuda/simulator.h"

namespace simulated_cuda {
namespace {

struct Pinned {
  size_t bytes = 0;
  Uses uses{};
};

struct Pending {
  AsyncCopy copy;
  bool to_host = false;
  std::string data{};   // to the host: what will be there
  size_t checksum = 0;  // from the host: of what was there
};

struct HostMemory {
  std::map<const char*, Pinned> blocks;
  std::vector<Pending> pending;
};

std::atomic<size_t> pending_copies{0};

HostMemory& memory() {
  static auto* const kMemory = new HostMemory;
  return *kMemory;
}

size_t checksum(const char* bytes, size_t count) { return std::hash<std::string_view>()({bytes, count}); }

std::pair<const char* const, Pinned>* block_of(const void* address) {
  const auto* const at = static_cast<const char*>(address);
  auto after = memory().blocks.upper_bound(at);
  if (after == memory().blocks.begin()) return nullptr;
  auto& found = *std::prev(after);
  return at < found.first + found.second.bytes ? &found : nullptr;
}

bool overlap(const char* a, size_t bytes, const AsyncCopy& copy) {
  return a < copy.host + copy.bytes && copy.host < a + bytes;
}

std::string race_of_source(const Pending& pending) {
  if (pending.to_host || checksum(pending.copy.host, pending.copy.bytes) == pending.checksum) return {};
  return "lockstep simulator: a wait is missing: the host wrote to the source of " + pending.copy.work + " on " +
         name_of(pending.copy.moment) + " before it waited for that copy" +
         "\n  next:   record an event after the copy; synchronize() with it before the memory is written again";
}

// The allocator keeps pinned memory until the copies that use it are over: nothing is lost, but nothing lands there either.
void drop_pending(const char* begin, size_t bytes) {
  std::erase_if(memory().pending, [&](const Pending& pending) {
    if (!overlap(begin, bytes, pending.copy)) return false;
    report_race_later(race_of_source(pending));
    return true;
  });
  pending_copies = memory().pending.size();
}

void free_pinned(void* address) {
  const Lock lock(mutex());
  const auto at = memory().blocks.find(static_cast<const char*>(address));
  if (at == memory().blocks.end()) return;
  drop_pending(at->first, at->second.bytes);
  memory().blocks.erase(at);
  std::free(address);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &free_pinned, c10::kCPU};
    void* const at = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    TORCH_CHECK(at != nullptr, "lockstep simulator: no memory for ", bytes, " pinned bytes");
    std::memset(at, 0xff, bytes);
    const Lock lock(mutex());
    memory().blocks.emplace(static_cast<const char*>(at), Pinned{bytes});
    return {at, at, &free_pinned, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

void note_pinned(const AsyncCopy& copy, bool writes, const c10::Stream& stream) {
  auto* const block = block_of(copy.host);
  if (block == nullptr) return;
  const auto begin = static_cast<size_t>(copy.host - block->first);
  report_race(note(block->second.uses, {copy.work, copy.moment, begin, begin + copy.bytes, writes}, stream));
}

// ---- Operators of the host on memory that a copy still uses.

bool looks_at_no_data(const at::RecordFunction& function) {
  static const std::vector<std::string_view> kNames{
      "aten::to",        "aten::_to_copy",          "aten::is_pinned",
      "aten::new_empty", "aten::new_empty_strided", "aten::record_stream"};
  const std::string_view name = function.name();
  if (name.ends_with("_like") || std::ranges::find(kNames, name) != kNames.end()) return true;
  const auto schema = function.operator_schema();
  return !schema || std::ranges::any_of(schema->returns(), [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  });
}

std::string race_of_host(const at::RecordFunction& function, const at::Tensor& tensor) {
  const auto* const begin = static_cast<const char*>(tensor.const_data_ptr());
  const auto bytes = static_cast<size_t>(tensor.nbytes());
  for (const Pending& pending : memory().pending)
    if (pending.to_host && overlap(begin, bytes, pending.copy))
      return "lockstep simulator: a wait is missing: " + std::string(function.name()) +
             " on the host uses bytes that " + pending.copy.work + " on " + name_of(pending.copy.moment) + " writes" +
             "\n  next:   record an event after the copy, synchronize() with it before the host looks";
  return {};
}

std::unique_ptr<at::ObserverContext> look_at(const at::RecordFunction& function) {
  if (pending_copies == 0 || looks_at_no_data(function)) return nullptr;
  const auto inputs = function.inputs();
  const auto is_tensor = [](const c10::IValue& input) { return input.isTensor() && input.toTensor().defined(); };
  if (std::ranges::any_of(inputs, [&](const auto& input) { return is_tensor(input) && !input.toTensor().is_cpu(); }))
    return nullptr;
  const Lock lock(mutex());
  for (const c10::IValue& input : inputs)
    if (is_tensor(input) && input.toTensor().layout() == c10::kStrided)
      report_race_later(race_of_host(function, input.toTensor()));
  return nullptr;
}

void watch_the_host() {
  static const bool kWatches = [] {
    at::addGlobalCallback(at::RecordFunctionCallback(&look_at).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
    return true;
  }();
  (void)kWatches;
}

}  // namespace

c10::Allocator* pinned_memory() {
  static PinnedMemory allocator;
  return &allocator;
}

bool is_pinned(const void* address) {
  const Lock lock(mutex());
  return block_of(address) != nullptr;
}

void copy_to_host_later(AsyncCopy copy, const char* from, const c10::Stream& stream) {
  watch_the_host();
  note_pinned(copy, true, stream);
  std::memset(copy.host, 0xff, copy.bytes);
  memory().pending.push_back({std::move(copy), true, std::string(from, copy.bytes)});
  pending_copies = memory().pending.size();
}

void copy_from_host(AsyncCopy copy, char* to, const c10::Stream& stream) {
  note_pinned(copy, false, stream);
  std::memcpy(to, copy.host, copy.bytes);
  for (const Pending& pending : memory().pending) {  // what another copy puts there is there for this stream
    if (!pending.to_host || !overlap(copy.host, copy.bytes, pending.copy)) continue;
    const char* const begin = std::max(copy.host, pending.copy.host);
    const char* const end = std::min(copy.host + copy.bytes, pending.copy.host + pending.copy.bytes);
    std::memcpy(to + (begin - copy.host), pending.data.data() + (begin - pending.copy.host),
                static_cast<size_t>(end - begin));
  }
  const size_t sum = checksum(copy.host, copy.bytes);
  memory().pending.push_back({std::move(copy), false, {}, sum});
  pending_copies = memory().pending.size();
}

namespace {

void land(const Pending& landing) {
  std::memcpy(landing.copy.host, landing.data.data(), landing.copy.bytes);
  for (Pending& reader : memory().pending)
    if (!reader.to_host && overlap(landing.copy.host, landing.copy.bytes, reader.copy))
      reader.checksum = checksum(reader.copy.host, reader.copy.bytes);
}

}  // namespace

void land_copies() {
  std::string race;
  std::erase_if(memory().pending, [&](const Pending& pending) {
    if (!host_waited_for(pending.copy.moment)) return false;
    if (pending.to_host) land(pending);
    if (race.empty()) race = race_of_source(pending);
    return true;
  });
  pending_copies = memory().pending.size();
  throw_late_races();
  report_race(race);
}

}  // namespace simulated_cuda
