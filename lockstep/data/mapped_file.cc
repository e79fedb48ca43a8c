#include "lockstep/data/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/base/unique_fd.h"

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

MappedFile::MappedFile(const std::filesystem::path& path) : path_(path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status {};
  if (!fd || ::fstat(fd.get(), &status) != 0) throw unreadable(path, std::strerror(errno));
  if (!S_ISREG(status.st_mode)) throw unreadable(path, "not a regular file");
  size_ = static_cast<std::size_t>(status.st_size);
  if (size_ == 0) return;
  void* data = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) throw unreadable(path, std::strerror(errno));
  data_ = static_cast<const std::uint8_t*>(data);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::uint8_t*>(data_), size_);
}

void MappedFile::will_need(std::size_t offset, std::size_t bytes) const {
  const std::size_t begin = offset / kPage * kPage;
  ::madvise(const_cast<std::uint8_t*>(data_) + begin, offset + bytes - begin, MADV_WILLNEED);
}

}  // namespace lockstep
