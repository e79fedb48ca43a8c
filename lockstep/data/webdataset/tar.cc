// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/webdataset/shards.h"

#include <cstring>
#include <iomanip>
#include <numeric>

#include "lockstep/base/cache_line.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

constexpr uint64_t kNoNumber = ~uint64_t{0};

struct TarHeader {
  char name[100], mode[8], user[8], group[8], bytes[12], time[12], sum[8], type, link[100], magic[8], names[64],
      device[16], prefix[167];
};
static_assert(sizeof(TarHeader) == kTarBlock);

// A field ends at a zero, or is full.
template <size_t size>
std::string_view text_in(const char (&field)[size]) {
  return {field, ::strnlen(field, size)};
}

template <size_t size>
uint64_t octal_in(const char (&field)[size]) {
  uint64_t value = kNoNumber;
  const std::string_view text = text_in(field);
  std::from_chars(text.data() + std::min(text.find_first_not_of(' '), text.size()), text.data() + text.size(), value,
                  8);
  return value;
}

// Of all bytes, with spaces in place of the sum.
uint64_t sum_in(TarHeader header) {
  std::memset(header.sum, ' ', sizeof header.sum);
  const auto* const first = reinterpret_cast<const uint8_t*>(&header);
  return std::accumulate(first, first + sizeof header, uint64_t{0});
}

// Reads records "LENGTH KEY=VALUE\n". Returns false: they make no sense, or the file is sparse.
bool read_pax(std::string_view text, TarFile& file) {
  for (size_t length = 0; !text.empty(); text.remove_prefix(length)) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), length);
    const auto begin = static_cast<size_t>(end - text.data()) + 1;
    if (error != std::errc() || length <= begin || length > text.size()) return false;
    const std::string_view record = text.substr(begin, length - begin - 1);
    if (record.starts_with("path=")) file.name = record.substr(5);
    if (record.starts_with("size=") && !parse_int(record.substr(5), file.bytes)) return false;
    if (record.starts_with("GNU.sparse")) return false;
  }
  return true;
}

}  // namespace

DataError damaged_shard(const DataFile& file, uint64_t offset, const std::string& what) {
  return DataError({.what = concat(file.path().filename().string(), ": ", what),
                    .here = concat(file.path().string(), ", offset ", offset),
                    .likely = "an interrupted copy, or a file that was changed",
                    .next = "copy it again, or pack the data again"});
}

std::string text_at(const DataFile& file, uint64_t offset, uint64_t bytes) {
  std::string text(std::min(bytes, uint64_t{1} << 20), '\0');
  file.read(offset, {reinterpret_cast<uint8_t*>(text.data()), text.size()});
  return text;
}

std::vector<TarFile> files_in_tar(const DataFile& tar) {
  if (tar.size() > 1 && tar.read_at<uint16_t>(0) == 0x8B1F)
    throw DataError({.what = concat(tar.path().filename().string(), ": it is compressed"),
                     .here = tar.path().string(),
                     .likely = "shards for reading from end to end; lockstep reads samples in random order",
                     .next = "gunzip it"});
  std::vector<TarFile> files;
  const TarFile unknown{"", 0, kNoNumber};
  TarFile next = unknown;  // what headers said of it
  for (uint64_t at = 0, end = 0;; at = end) {
    const uint64_t begin = at + kTarBlock;
    if (begin > tar.size()) throw damaged_shard(tar, at, "it is cut: no end mark");
    const auto header = tar.read_at<TarHeader>(at);
    const std::string_view bytes(reinterpret_cast<const char*>(&header), sizeof header);
    if (bytes.find_first_not_of('\0') == bytes.npos) return files;
    if (octal_in(header.sum) != sum_in(header)) throw damaged_shard(tar, at, "no tar header where one should be");
    const bool regular = header.type == '0' || header.type == '\0' || header.type == '7';
    const uint64_t size = regular && next.bytes != kNoNumber ? next.bytes : octal_in(header.bytes);
    if (size > tar.size() - begin || round_up(size, kTarBlock) > tar.size() - begin)
      throw damaged_shard(tar, at, "it is cut: a file is longer");
    end = begin + round_up(size, kTarBlock);
    if (regular) {
      const bool prefixed = text_in(header.magic) == "ustar" && header.prefix[0] != '\0';
      const std::string folder = prefixed ? concat(text_in(header.prefix), '/') : "";
      files.push_back({next.name.empty() ? concat(folder, text_in(header.name)) : next.name, begin, size});
      next = unknown;
    } else if (header.type == 'L') {
      next.name = text_at(tar, begin, size).c_str();
    } else if (header.type == 'x') {
      if (!read_pax(text_at(tar, begin, size), next)) throw damaged_shard(tar, at, "pax records that can't be read");
    } else if (header.type == '5') {
      next = unknown;
    } else if (header.type != 'K' && header.type != 'g') {
      throw damaged_shard(tar, at, concat(text_in(header.name), " is a link or special"));
    }
  }
}

std::string tar_header(const std::string& name, uint64_t bytes) {
  if (bytes >> 33 != 0)
    throw UsageError({.what = concat(name, " has ", bytes, " bytes; a shard takes less than 8 GiB")});
  TarHeader header{};
  const auto put = [](auto& field, uint64_t value) {
    concat(std::oct, std::setfill('0'), std::setw(sizeof field - 1), value).copy(field, sizeof field);
  };
  name.copy(header.name, sizeof header.name);
  put(header.mode, 0644);
  put(header.user, 0);
  put(header.group, 0);
  put(header.bytes, bytes);
  put(header.time, 0);
  header.type = '0';
  std::memcpy(header.magic,
              "ustar\0"  // and the version
              "00",
              sizeof header.magic);
  put(header.sum, sum_in(header));
  return {reinterpret_cast<const char*>(&header), sizeof header};
}

}  // namespace lockstep
