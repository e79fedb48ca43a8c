// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/formats/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstring>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr std::size_t kPage = 4096;

DataError unreadable(const std::filesystem::path& path, const std::string& why) {
  return DataError({.what = concat("can't read ", path.string(), ": ", why),
                    .here = path.string(),
                    .likely = "a wrong path, or no permission",
                    .next = "look at the path that was given"});
}

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path)
    // O_NONBLOCK: opening a named pipe would wait for its writer without limit; of a regular file it changes nothing.
    : path_(path), fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  struct stat status {};
  if (!fd_ || ::fstat(fd_.get(), &status) != 0) throw unreadable(path, std::strerror(errno));
  if (!S_ISREG(status.st_mode)) throw unreadable(path, "not a regular file");
  const std::size_t bytes = to_size(status.st_size);
  if (bytes == 0) return;
  void* data = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd_.get(), 0);
  if (data == MAP_FAILED) throw unreadable(path, std::strerror(errno));
  data_ = {static_cast<const std::uint8_t*>(data), Unmap{bytes}};
}

void MappedFile::Unmap::operator()(const std::uint8_t* data) const { ::munmap(const_cast<std::uint8_t*>(data), bytes); }

// A read of the last byte that fails instead of waiting for the disk (RWF_NOWAIT) says whether that page is cached. If
// so, all of the part is taken as cached: parts are read front to back. Else the kernel is asked for every page of the
// part, from the page boundary before `offset` on, and reads them while this thread goes on.
void MappedFile::will_need(std::size_t offset, std::size_t bytes) const {
  if (bytes == 0) return;
  char byte = 0;
  const iovec into{&byte, 1};
  if (::preadv2(fd_.get(), &into, 1, static_cast<off_t>(offset + bytes - 1), RWF_NOWAIT) == 1) return;
  const std::size_t begin = offset / kPage * kPage;
  ::madvise(const_cast<std::uint8_t*>(data_.get()) + begin, offset + bytes - begin, MADV_WILLNEED);
}

}  // namespace lockstep
