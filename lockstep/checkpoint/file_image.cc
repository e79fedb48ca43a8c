// SPDX-License-Identifier: Apache-2.0
#include "lockstep/checkpoint/file_image.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "lockstep/base/files/file.h"
#include "lockstep/base/process/cgroup.h"
#include "lockstep/checkpoint/safetensors.h"
#include "lockstep/error.h"

namespace lockstep {

std::size_t tensor_bytes(const TensorFile& file) {
  std::size_t bytes = 0;
  for (const auto& [name, tensor] : file.tensors) bytes += tensor.nbytes();
  return bytes;
}

namespace {

// The values in row-major order, from any layout or device. memcpy() passes large copies by the caches, copy_() does not.
void copy_values(const torch::Tensor& tensor, std::byte* into) {
  if (tensor.nbytes() == 0) return;
  if (tensor.is_cpu() && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg()) {
    std::memcpy(into, tensor.const_data_ptr(), tensor.nbytes());
    return;
  }
  torch::from_blob(into, tensor.sizes(), torch::TensorOptions(tensor.scalar_type())).copy_(tensor.detach());
}

}  // namespace

void copy_file(const std::string& head, const TensorFile& file, std::byte* into) {
  into = std::ranges::copy(std::as_bytes(std::span(head)), into).out;
  for (const auto& [name, tensor] : file.tensors) {
    copy_values(tensor, into);
    into += tensor.nbytes();
  }
}

FileImage::~FileImage() {
  if (!memory_.empty()) ::munmap(memory_.data(), memory_.size());
}

void FileImage::reserve(std::size_t bytes) {
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

void FileImage::copy(const std::vector<TensorFile>& files) {
  files_.clear();
  std::vector<std::string> heads;
  std::size_t bytes = 0;
  for (const TensorFile& file : files) {
    heads.push_back(safetensors_head(file));
    const std::size_t tensors = tensor_bytes(file);
    files_.push_back({.names = {}, .begin = bytes, .bytes = heads.back().size() + tensors, .tensor_bytes = tensors});
    bytes += files_.back().bytes;
  }
  reserve(bytes);
  for (std::size_t i = 0; i < files.size(); ++i) {
    copy_file(heads[i], files[i], memory_.data() + files_[i].begin);
    for (const auto& [name, tensor] : files[i].tensors) files_[i].names.push_back(name);
  }
}

void FileImage::write(const File& file, const std::filesystem::path& path) {
  const auto bytes = memory_.subspan(file.begin, file.bytes);
  set_checksum(bytes);
  AtomicFile on_disk(path);
  on_disk.write(bytes.data(), bytes.size());
  on_disk.commit();
}

}  // namespace lockstep
