// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/files/background_writer.h"

#include <signal.h>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

#include "lockstep/base/files/write_all.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

constexpr std::chrono::seconds kWriteEvery{1};  // or when half of the queue is full

// Makes a pipe that nobody reads any more an error of this thread's write().
void block_sigpipe() {
  sigset_t pipe;
  ::sigemptyset(&pipe);
  ::sigaddset(&pipe, SIGPIPE);
  ::pthread_sigmask(SIG_BLOCK, &pipe, nullptr);
}

}  // namespace

struct BackgroundWriter::Shared {
  UniqueFd file;
  std::string name;
  BackgroundWriterOptions options;

  std::mutex mutex;  // guards what follows; never held while the disk is written to
  std::condition_variable changed;
  std::deque<std::string> records;
  size_t waiting = 0;  // bytes, with those that are being written
  int64_t offered = 0;
  int64_t written = 0;
  std::string trouble;  // the first
  bool finishing = false;
  bool ended = false;

  void note(const std::string& why) {
    if (!trouble.empty()) return;
    trouble = why;
    if (!finishing) log_warning(concat(name, ": ", why, "; what can't be written is dropped and counted"));
  }

  bool is_urgent() const {
    return finishing || (options.at_once && !records.empty()) || waiting > options.most_waiting / 2;
  }

  void work() {
    block_sigpipe();
    std::unique_lock lock(mutex);
    while (!finishing || !records.empty()) {
      changed.wait_for(lock, kWriteEvery, [this] { return is_urgent(); });
      const auto taken = std::exchange(records, {});
      lock.unlock();
      for (const std::string& record : taken) write(record);
      lock.lock();
    }
    ended = true;
    changed.notify_all();
  }

  // A record that does not fit on the disk is taken back, so that the ones after it can be read.
  void write(const std::string& record) {
    const auto before = ::lseek(file.get(), 0, SEEK_END);
    const bool good = write_all(file.get(), record);
    const int error = errno;
    if (!good && ::ftruncate(file.get(), before) == 0) ::lseek(file.get(), before, SEEK_SET);
    const std::lock_guard lock(mutex);
    waiting -= record.size();
    if (good)
      ++written;
    else
      note(std::strerror(error));
    if (waiting == 0) changed.notify_all();
  }
};

BackgroundWriter::BackgroundWriter(UniqueFd file, std::string name, const BackgroundWriterOptions& options)
    : shared_(new Shared{std::move(file), std::move(name), options}) {
  std::thread([shared = shared_] { shared->work(); }).detach();
}

BackgroundWriter::~BackgroundWriter() {
  if (!finished_) finish();
}

void BackgroundWriter::offer(std::string record) {
  const std::lock_guard lock(shared_->mutex);
  ++shared_->offered;
  if (shared_->waiting + record.size() > shared_->options.most_waiting) return shared_->note("it is too slow");
  shared_->waiting += record.size();
  shared_->records.push_back(std::move(record));
  if (shared_->is_urgent()) shared_->changed.notify_one();
}

bool BackgroundWriter::wait_until_written(std::chrono::milliseconds timeout) {
  std::unique_lock lock(shared_->mutex);
  return shared_->changed.wait_for(lock, timeout, [this] { return shared_->waiting == 0; });
}

int64_t BackgroundWriter::finish(std::chrono::milliseconds timeout) {
  std::unique_lock lock(shared_->mutex);
  shared_->finishing = true;
  shared_->changed.notify_one();
  if (!shared_->changed.wait_for(lock, timeout, [this] { return shared_->ended; })) {
    shared_->note("it is too slow");
    shared_->records.clear();
  }
  const int64_t dropped = shared_->offered - shared_->written;
  if (!std::exchange(finished_, true) && dropped > 0)
    log_warning(
        concat(shared_->name, ": ", dropped, " of ", shared_->offered, " records were dropped: ", shared_->trouble));
  return dropped;
}

}  // namespace lockstep
