// SPDX-License-Identifier: Apache-2.0
#include "lockstep/checkpoint/checkpoint_writer.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <utility>

#include "lockstep/base/log.h"
#include "lockstep/base/process/cgroup.h"
#include "lockstep/base/text.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/observe/phase_scope.h"
#include "lockstep/observe/trace.h"

namespace lockstep {
namespace {

constexpr int kNice = 10;  // a tenth of a core that a rank wants as well

// Receives what other ranks send, which they do in the order of the names, whether or not it can be written.
void receive_rest(const TensorFile& file, const FetchTensor& fetch, int received) {
  for (const auto& [name, tensor] : file.tensors)
    if (tensor.is_meta() && received-- <= 0) fetch(name);
}

}  // namespace

StateCopy::~StateCopy() {
  if (!memory_.empty()) ::munmap(memory_.data(), memory_.size());
}

void StateCopy::reserve(size_t bytes) {
  if (bytes <= memory_.size()) return;
  require_memory_room(bytes, memory_room());
  if (!memory_.empty()) ::munmap(memory_.data(), memory_.size());
  memory_ = {};
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw system_error("take memory for", "a copy of the state");
  memory_ = {static_cast<std::byte*>(memory), bytes};
  ::madvise(memory, bytes, MADV_HUGEPAGE);
  ::madvise(memory, bytes, MADV_POPULATE_WRITE);  // an older kernel has none: then the first copy takes longer
}

TensorFile StateCopy::copy(const TensorFile& file) {
  reserve(tensor_bytes(file));
  TensorFile copied{.tensors = {}, .metadata = file.metadata};
  copy_file("", file, memory_.data());
  std::byte* begin = memory_.data();
  for (const auto& [name, tensor] : file.tensors) {
    copied.tensors[name] = torch::from_blob(begin, tensor.sizes(), torch::TensorOptions(tensor.scalar_type()));
    begin += tensor.nbytes();
  }
  return copied;
}

struct CheckpointWriter::Shared {
  explicit Shared(CheckpointFolder its) : folder(std::move(its)) {}

  CheckpointFolder folder;  // these two: of the thread while there is a job, else of the caller
  StateCopy copy;

  mutable std::mutex mutex;  // guards what follows; never held while the disk is written to
  std::condition_variable changed;
  std::function<void()> job;  // until it is done
  bool ending = false;
  int64_t newest = -1;  // on the disk
  std::string trouble;
  std::vector<Saved> saved;

  void work() {
    ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), kNice);
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return job || ending; });
      if (!job) return;
      lock.unlock();
      job();
      lock.lock();
      job = nullptr;
      changed.notify_all();
    }
  }

  void start(std::function<void()> next) {
    const std::lock_guard lock(mutex);
    job = std::move(next);
    changed.notify_all();
  }

  // write() puts the checkpoint on the disk and returns its path. False: it failed.
  bool write(int64_t step, const std::function<std::string()>& write) {
    const Stopwatch watch;
    std::string why, path;
    try {
      const trace::Span span("write checkpoint", step);
      path = write();
    } catch (const std::exception& error) {
      why = what_of(error);
    }
    if (!why.empty())
      log_warning(concat("the checkpoint of step ", step, " is not saved: ", why,
                         "; training goes on, and the next save tries again"));
    const std::lock_guard lock(mutex);
    trouble = why;
    if (!why.empty()) return false;
    newest = step;
    saved.push_back({step, watch.seconds(), path});
    return true;
  }
};

CheckpointWriter::CheckpointWriter(CheckpointFolder folder, std::chrono::milliseconds patience)
    : shared_(std::make_shared<Shared>(std::move(folder))), patience_(patience) {
  thread_ = std::thread([shared = shared_] { shared->work(); });
}

CheckpointWriter::~CheckpointWriter() {
  const bool idle = wait_until_idle(patience_);
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->ending = true;
    shared_->changed.notify_all();
  }
  idle ? thread_.join() : thread_.detach();
}

CheckpointFolder& CheckpointWriter::folder() {
  if (!wait_until_idle(patience_)) throw CheckpointError({.what = trouble(), .next = "try again later"});
  return shared_->folder;
}

bool CheckpointWriter::wait_until_idle(std::chrono::milliseconds timeout) {
  std::unique_lock lock(shared_->mutex);
  const auto wait = stalled_ ? std::chrono::milliseconds(0) : timeout;
  stalled_ = !shared_->changed.wait_for(lock, wait, [this] { return !shared_->job; });
  if (stalled_) shared_->trouble = "the disk does not answer: an earlier checkpoint is still being written";
  return !stalled_;
}

void CheckpointWriter::save(int64_t step, const TensorFile& file, const FetchTensor& fetch) {
  const PhaseScope saving(Phase::kSaving);
  static_cast<void>(safetensors_head(file));  // throws what this thread has to throw
  shared_->folder.require_newest(step);
  const bool elsewhere = std::ranges::any_of(file.tensors, [](const auto& each) { return each.second.is_meta(); });
  if (!wait_until_idle(patience_)) {
    log_warning(concat("the checkpoint of step ", step, " is left out: ", trouble(), "; training goes on"));
    return receive_rest(file, fetch, 0);
  }
  shared_->folder.keep_also(also_);
  if (elsewhere) return save_now(step, file, fetch);
  TensorFile copy;
  try {
    copy = shared_->copy.copy(file);
  } catch (const SystemError&) {  // no memory for a copy
    return save_now(step, file, fetch);
  }
  shared_->start([shared = shared_, step, copy = std::move(copy)] {
    shared->write(step, [&] { return shared->folder.save(step, copy); });
  });
}

void CheckpointWriter::save_now(int64_t step, const TensorFile& file, const FetchTensor& fetch) {
  int received = 0;
  std::exception_ptr lost;  // an error of another rank, not of the disk
  const auto counting = [&](const std::string& name) {
    ++received;
    try {
      return fetch(name);
    } catch (...) {
      lost = std::current_exception();
      throw;
    }
  };
  const bool good = shared_->write(step, [&] { return shared_->folder.save(step, file, counting); });
  if (lost) std::rethrow_exception(lost);
  if (!good) receive_rest(file, fetch, received);
}

bool CheckpointWriter::finish(int64_t step, std::chrono::milliseconds timeout) {
  const PhaseScope saving(Phase::kSaving);
  return wait_until_idle(timeout) && shared_->newest == step;
}

std::string CheckpointWriter::trouble() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->trouble;
}

std::vector<CheckpointWriter::Saved> CheckpointWriter::take_saved() {
  const std::lock_guard lock(shared_->mutex);
  return std::exchange(shared_->saved, {});
}

}  // namespace lockstep
