// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/reports/metrics.h"

#include <fcntl.h>

#include <filesystem>
#include <fstream>

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr std::chrono::milliseconds kHandOver{100};
constexpr std::chrono::milliseconds kUsual{1};  // what a disk takes that is not slow

bool ends_within_a_line(const std::string& path) {
  if (!std::filesystem::is_regular_file(path)) return false;
  std::ifstream in(path, std::ios::binary);
  in.seekg(-1, std::ios::end);  // fails in an empty file
  return in && in.get() != '\n';
}

}  // namespace

MetricsFile::MetricsFile(const std::string& path, bool append) : path_(path) {
  UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | (append ? O_APPEND : O_TRUNC), 0666));
  if (!file) throw system_error("write the metrics to", path);
  writer_ = std::make_unique<BackgroundWriter>(std::move(file), path, BackgroundWriterOptions{.at_once = true});
  if (append && ends_within_a_line(path)) writer_->offer("\n");
}

void MetricsFile::write(const Json& event) {
  if (!writer_ && !command_) return;
  const std::string line = event.dump() + '\n';
  if (command_) command_->offer(line);
  if (writer_) writer_->offer(line);
}

void MetricsFile::hand_over() {
  if (!writer_ || waited_ >= kHandOver) return;
  const auto began = std::chrono::steady_clock::now();
  writer_->wait_until_written(kHandOver);
  const auto took = std::chrono::steady_clock::now() - began;
  if (took > kUsual) waited_ += took;
}

bool MetricsFile::finish() {
  const bool is_whole = !writer_ || writer_->finish() == 0;
  if (command_) command_->finish();
  return is_whole;
}

void MetricsFile::require_written() {
  if (!finish())
    throw SystemError({.what = concat("the metrics in ", path_, " lack events, which could not be written"),
                       .here = path_,
                       .likely = "a full disk, or one that does not answer",
                       .next = "make room before the next run; the training itself came to its end"});
}

}  // namespace lockstep
