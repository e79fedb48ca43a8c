// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/files/file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <iomanip>
#include <random>

#include "lockstep/base/files/read_fully.h"
#include "lockstep/base/files/write_all.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

void flush_to_disk(int fd, const std::filesystem::path& path) {
  if (::fsync(fd) != 0) throw system_error("flush to disk", path);
}

// A rename is on the disk only when the folder that holds the name is.
void flush_folder(const std::filesystem::path& file) {
  const auto folder = file.has_parent_path() ? file.parent_path() : std::filesystem::path(".");
  const UniqueFd fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) throw system_error("open the folder", folder);
  flush_to_disk(fd.get(), folder);
}

UniqueFd open_to_read(const std::filesystem::path& path) {
  // O_NONBLOCK: opening a named pipe would wait for its writer without limit; of a regular file it changes nothing.
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd) throw system_error("read", path);
  return fd;
}

// Random, because processes on other machines may write the same path.
std::string temporary_name(const std::filesystem::path& path) {
  std::random_device random;
  const uint64_t number = uint64_t{random()} << 32 | random();
  return concat(path.string(), ".tmp-", std::hex, std::setw(16), std::setfill('0'), number);
}

}  // namespace

struct alignas(4096) AtomicFile::Block {
  std::array<std::byte, size_t{4} << 20> bytes;
};

AtomicFile::AtomicFile(std::filesystem::path path, Way way)
    : path_(std::move(path)), temporary_(temporary_name(path_)) {
  if (way == Way::kPastCache) block_ = std::make_unique_for_overwrite<Block>();
  fd_.reset(::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  if (!fd_) throw system_error("write", path_);
}

AtomicFile::~AtomicFile() {
  if (fd_) ::unlink(temporary_.c_str());
}

void AtomicFile::write(const void* data, size_t bytes) {
  if (!block_) return put(data, bytes);
  for (const auto* from = static_cast<const std::byte*>(data); bytes > 0;) {
    const size_t part = std::min(bytes, sizeof(Block) - filled_);
    std::memcpy(&block_->bytes[filled_], from, part);
    from += part, bytes -= part, filled_ += part;
    if (filled_ == sizeof(Block)) put_block();
  }
}

void AtomicFile::put(const void* data, size_t bytes) {
  if (!write_all(fd_.get(), {static_cast<const char*>(data), bytes})) throw system_error("write", path_);
}

// Through the cache where the disk refuses: a file system without O_DIRECT, or a place that is not aligned.
void AtomicFile::put_block() {
  const off_t begin = ::lseek(fd_.get(), 0, SEEK_CUR);
  ::fcntl(fd_.get(), F_SETFL, O_DIRECT);
  if (!write_all(fd_.get(), {reinterpret_cast<const char*>(block_.get()), filled_})) {
    ::fcntl(fd_.get(), F_SETFL, 0);
    ::lseek(fd_.get(), begin, SEEK_SET);
    put(block_.get(), filled_);
  }
  filled_ = 0;
}

void AtomicFile::put_rest() {
  if (!block_) return;
  ::fcntl(fd_.get(), F_SETFL, 0);
  put(block_.get(), std::exchange(filled_, 0));
}

void AtomicFile::overwrite(size_t at, const void* data, size_t bytes) {
  put_rest();
  if (::lseek(fd_.get(), static_cast<off_t>(at), SEEK_SET) < 0) throw system_error("write", path_);
  put(data, bytes);
  ::lseek(fd_.get(), 0, SEEK_END);
}

void AtomicFile::commit() {
  put_rest();
  flush_to_disk(fd_.get(), path_);
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) throw system_error("rename a finished file to", path_);
  fd_.reset();
  flush_folder(path_);
}

void make_folder(const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) throw SystemError({.what = concat("can't make the folder ", path.string(), ": ", error.message())});
}

void write_file(const std::filesystem::path& path, const std::string& content) {
  AtomicFile file(path);
  file.write(content.data(), content.size());
  file.commit();
}

std::string read_file(const std::filesystem::path& path) {
  const UniqueFd fd = open_to_read(path);
  std::string content;
  std::array<char, 64 * 1024> buffer;
  for (;;) {
    const ssize_t bytes = ::read(fd.get(), buffer.data(), buffer.size());
    if (bytes == 0) return content;
    if (bytes < 0 && errno != EINTR) throw system_error("read", path);
    if (bytes > 0) content.append(buffer.data(), to_size(bytes));
  }
}

ReadableFile::ReadableFile(std::filesystem::path path) : path_(std::move(path)), fd_(open_to_read(path_)) {
  struct stat status {};
  if (::fstat(fd_.get(), &status) != 0) throw system_error("read", path_);
  size_ = to_size(status.st_size);
}

void ReadableFile::read(size_t at, void* into, size_t bytes) const {
  if (read_fully(fd_.get(), at, {static_cast<std::byte*>(into), bytes}).empty()) return;
  if (errno == 0) errno = EIO;  // shorter than it was
  throw system_error("read", path_);
}

}  // namespace lockstep
