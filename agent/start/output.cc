// SPDX-License-Identifier: Apache-2.0
#include "agent/start/output.h"

#include <fcntl.h>
#include <sys/resource.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "lockstep/base/pipe.h"
#include "lockstep/base/sockets/poll.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr size_t kPipeBytes = 64 * 1024;  // what a pipe holds, unless somebody has changed it
constexpr size_t kAtomicBytes = 4096;     // PIPE_BUF: a writable pipe takes this much without blocking

void keep_last(std::deque<std::string>& lines, std::string_view line) {
  lines.emplace_back(line);
  if (lines.size() > kLastLines) lines.pop_front();
}

UniqueFd nameless_file() {
  std::error_code ignored;
  std::string pattern = (std::filesystem::temp_directory_path(ignored) / "lockstep-output-XXXXXX").string();
  UniqueFd fd(::mkostemp(pattern.data(), O_CLOEXEC));
  if (fd) ::unlink(pattern.c_str());
  return fd;
}

}  // namespace

// Each turn takes what is left of one line: up to its newline, the end of `bytes`, or the longest line. rest_ never
// holds more than kLongestLine bytes, so a stream without newlines takes bounded memory; a line of exactly that length
// is passed on whole when its newline follows at once (end == 0).
void LineSplitter::feed(std::string_view bytes, const OnLine& on_line) {
  while (!bytes.empty()) {
    const size_t end = bytes.find('\n');
    if (rest_.size() == kLongestLine && end != 0) finish(on_line);
    const size_t taken = std::min({end, bytes.size(), kLongestLine - rest_.size()});
    rest_.append(bytes.substr(0, taken));
    bytes.remove_prefix(taken);
    if (taken != end) continue;
    bytes.remove_prefix(1);
    on_line(rest_);
    rest_.clear();
  }
}

void LineSplitter::finish(const OnLine& on_line) {
  if (!rest_.empty()) on_line(rest_);
  rest_.clear();
}

// A file description of its own, so that O_NONBLOCK does not reach other programs at the same terminal.
Sink::Sink(int fd) : fd_(fd) {
  if (::isatty(fd) != 0)
    terminal_.reset(::open(concat("/proc/self/fd/", fd).c_str(), O_WRONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC));
}

void Sink::add(std::string_view text) {
  const bool fits = pending_.empty() || pending_.size() + text.size() <= kMostPending;
  if (fits && read_ == filed_ && !full())
    pending_ += text;
  else if (full() || !add_to_file(text))
    tail_ += text;
}

// False: no room on the disk, or not within RLIMIT_FSIZE, beyond which a signal would end this process.
bool Sink::add_to_file(std::string_view text) {
  rlimit limit{};
  if (!file_) file_ = nameless_file();
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && filed_ + text.size() > limit.rlim_cur) return false;
  for (size_t done = 0; done < text.size();) {
    const ssize_t some =
        ::pwrite(file_.get(), text.data() + done, text.size() - done, static_cast<off_t>(filed_ + done));
    if (some <= 0) return false;  // the next text overwrites what was written of this one
    done += to_size(some);
  }
  filed_ += text.size();
  return true;
}

// pending_ was written: what comes after it.
void Sink::refill() {
  pending_.clear();
  written_ = 0;
  if (read_ == filed_) return pending_.swap(tail_);
  pending_.resize(std::min(kMostPending, filed_ - read_));
  const ssize_t some = ::pread(file_.get(), pending_.data(), pending_.size(), static_cast<off_t>(read_));
  if (some <= 0) throw system_error("read back", "the ranks' output");
  pending_.resize(to_size(some));
  read_ += to_size(some);
  if (read_ < filed_) return;
  read_ = filed_ = 0;
  file_.reset();  // the disk gets its room back
}

void Sink::add_line(std::string_view prefix, std::string_view line) {
  add(std::string(prefix).append(line).append("\n"));
}

void Sink::write_some() {
  const auto left = std::string_view(pending_).substr(written_);
  const size_t newline = left.rfind('\n', kAtomicBytes - 1);
  const ssize_t written =
      ::write(fd(), left.data(), newline < kAtomicBytes ? newline + 1 : std::min(left.size(), kAtomicBytes));
  if (written < 0 && errno != EINTR && errno != EAGAIN)
    throw system_error("pass on the ranks' output to", fd_ == STDOUT_FILENO ? "stdout" : "stderr");
  if (written > 0) written_ += to_size(written);
  if (written_ == pending_.size()) refill();
}

void Sink::flush() {
  pollfd writable = to_poll(fd(), POLLOUT);
  while (!empty())
    if (::poll(&writable, 1, -1) > 0) write_some();
}

void Sinks::add_events(std::vector<Event>& events) {
  for (Sink* sink : {&out, &err})
    if (!sink->empty()) events.push_back({sink->fd(), POLLOUT, [sink] { sink->write_some(); }});
}

void Sinks::flush() {
  out.flush();
  err.flush();
}

UniqueFd RankStream::open() {
  Pipe pipe = make_pipe();
  pipe_ = std::move(pipe.out);
  if (::fcntl(pipe_.get(), F_SETFL, O_NONBLOCK) != 0) throw system_error("prepare", "a pipe");
  return std::move(pipe.in);
}

// Bytes read; 0: nothing there now; -1: nothing will ever come.
long RankStream::read_once() {
  std::array<char, kPipeBytes> buffer;
  const ssize_t bytes = ::read(pipe_.get(), buffer.data(), buffer.size());
  if (bytes < 0) return errno == EAGAIN || errno == EINTR ? 0 : -1;
  if (bytes == 0) return -1;
  if (prefix_.empty()) sink_->add({buffer.data(), to_size(bytes)});
  lines_.feed({buffer.data(), to_size(bytes)}, [this](std::string_view line) { pass_on(line); });
  return bytes;
}

void RankStream::add_events(std::vector<Event>& events) {
  if (pipe_ && !sink_->full()) events.push_back({fd(), POLLIN, [this] { read_some(); }});
}

void RankStream::read_some() {
  if (read_once() < 0) close();
}

// Reads a pipe's capacity at most: what the dead rank wrote is in it already, and reads do not block.
void RankStream::drain() {
  if (!pipe_) return;
  const long capacity = std::max(::fcntl(pipe_.get(), F_GETPIPE_SZ), static_cast<int>(kPipeBytes));
  for (long total = 0; total < capacity;) {
    const long bytes = read_once();
    if (bytes <= 0) break;
    total += bytes;
  }
  close();
}

void RankStream::close() {
  pipe_.reset();
  lines_.finish([this](std::string_view line) { pass_on(line); });
}

void RankStream::pass_on(std::string_view line) {
  if (is_launcher_ && line.starts_with("[rank "))
    sink_->add_line(prefix_.substr(0, prefix_.size() - 2) + " ", line.substr(1));
  else if (!prefix_.empty())
    sink_->add_line(prefix_, line);
  keep_last(last_lines_, line);
}

std::vector<std::string> last_lines_of_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  in.seekg(0, std::ios::end);
  const auto size = static_cast<std::streamoff>(in.tellg());
  in.seekg(std::max<std::streamoff>(0, size - static_cast<std::streamoff>(kPipeBytes)));
  std::deque<std::string> lines;
  for (std::string line; std::getline(in, line);) keep_last(lines, line.substr(0, kLongestLine));
  return {lines.begin(), lines.end()};
}

}  // namespace lockstep
