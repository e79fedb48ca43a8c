// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/formats/data_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstring>

#include "lockstep/base/files/read_fully.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

DataError unreadable(const fs::path& path, const std::string& why) {
  return DataError({.what = concat("can't read ", path.string(), ": ", why),
                    .here = path.string(),
                    .likely = "a wrong path, or no permission"});
}

}  // namespace

DataFile::DataFile(fs::path path)
    // O_NONBLOCK: opening a named pipe would wait for its writer without limit; of a regular file it changes nothing.
    : path_(std::move(path)), fd_(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  struct stat status {};
  if (!fd_ || ::fstat(fd_.get(), &status) != 0) throw unreadable(path_, std::strerror(errno));
  if (!S_ISREG(status.st_mode)) throw unreadable(path_, "not a regular file");
  size_ = to_size(status.st_size);
}

void DataFile::read(uint64_t offset, std::span<uint8_t> into) const {
  const auto left = read_fully(fd_.get(), offset, std::as_writable_bytes(into));
  if (left.empty()) return;
  const int error = errno;
  throw DataError({.what = concat("can't read ", path_.string(), ": ",
                                  error != 0 ? std::strerror(error) : "it became shorter while it was in use"),
                   .here = concat(path_.string(), ", offset ", offset + into.size() - left.size()),
                   .likely = error != 0 ? "a failing disk" : "another program writes or copies this file"});
}

std::vector<uint8_t> DataFile::read_all() const {
  std::vector<uint8_t> bytes(size_);
  read(0, bytes);
  return bytes;
}

// A read of the last byte that fails instead of waiting for the disk (RWF_NOWAIT) says whether that page is cached. If
// so, all of the part is taken as cached: parts are read front to back. Else the kernel is asked for every page of the
// part, and reads them while this thread goes on.
void DataFile::will_need(uint64_t offset, uint64_t bytes) const {
  if (bytes == 0) return;
  char byte = 0;
  const iovec into{&byte, 1};
  if (::preadv2(fd_.get(), &into, 1, static_cast<off_t>(offset + bytes - 1), RWF_NOWAIT) == 1) return;
  ::posix_fadvise(fd_.get(), static_cast<off_t>(offset), static_cast<off_t>(bytes), POSIX_FADV_WILLNEED);
}

}  // namespace lockstep
