// SPDX-License-Identifier: Apache-2.0
// data/webdataset/tar.h: where the files in a tar lie, and headers for new ones. docs/design/dependencies.md says why not
// libarchive.
//
// Threads: any
#pragma once

#include "lockstep/data/formats/data_file.h"
#include "lockstep/error.h"

namespace lockstep {

constexpr std::uint64_t kTarBlock = 512;  // headers and contents begin at multiples of it

struct TarFile {
  std::string name;
  std::uint64_t offset;  // of its content
  std::uint64_t bytes;
};

DataError damaged_shard(const DataFile& file, std::uint64_t offset, const std::string& what);
std::string text_at(const DataFile& file, std::uint64_t offset, std::uint64_t bytes);

// Its regular files: of ustar, pax and GNU's long names. Throws DataError: compressed, damaged, cut, links, special files.
std::vector<TarFile> files_in_tar(const DataFile& tar);
std::string tar_header(const std::string& name, std::uint64_t bytes);  // throws UsageError: 8 GiB or more

}  // namespace lockstep
