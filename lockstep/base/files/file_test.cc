// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/files/file.h"

#include <gtest/gtest.h>

#include <iterator>

#include "lockstep/error.h"
#include "tests/launch/child.h"

namespace lockstep {
namespace {

using testing::TempFolder;

ptrdiff_t files_in(const TempFolder& folder) {
  return std::distance(std::filesystem::directory_iterator(folder.path()), std::filesystem::directory_iterator());
}

TEST(File, comes_back_as_it_was_written) {
  const TempFolder folder;
  const std::string content("a\0\n\xff", 4);
  write_file(folder.file("f"), content);
  EXPECT_EQ(read_file(folder.file("f")), content);
  write_file(folder.file("f"), "");
  EXPECT_EQ(read_file(folder.file("f")), "");
  EXPECT_EQ(files_in(folder), 1);
}

TEST(AtomicFile, without_commit_leaves_the_old_file) {
  const TempFolder folder;
  write_file(folder.file("f"), "old");
  {
    AtomicFile file(folder.file("f"));
    file.write("new", 3);
    EXPECT_EQ(read_file(folder.file("f")), "old");
  }
  EXPECT_EQ(read_file(folder.file("f")), "old");
  EXPECT_EQ(files_in(folder), 1);
}

// In pieces that fit no block, on a disk and in /dev/shm, whose file system may not know O_DIRECT.
TEST(AtomicFile, past_the_cache_is_the_same_file) {
  std::string content(9 * 1024 * 1024 + 3, '\0');
  for (size_t i = 0; i < content.size(); ++i) content[i] = static_cast<char>(i * 2654435761 >> 13);
  const TempFolder here;
  const TempFolder in_memory("/dev/shm");
  for (const size_t size : {size_t{5}, size_t{8 * 1024 * 1024}, content.size()})
    for (const TempFolder* folder : {&here, &in_memory}) {
      AtomicFile file(folder->file("f"), AtomicFile::Way::kPastCache);
      for (size_t at = 0; at < size; at += 1000003) file.write(&content[at], std::min(size - at, size_t{1000003}));
      file.overwrite(1, "abc", 3);
      file.commit();
      std::string expected = content.substr(0, size);
      expected.replace(1, 3, "abc");
      EXPECT_TRUE(read_file(folder->file("f")) == expected) << size;
    }
}

// After 5 bytes no block is aligned, and the disk refuses each.
TEST(AtomicFile, goes_through_the_cache_where_the_disk_refuses_a_block) {
  const TempFolder folder;
  const std::string content(9 * 1024 * 1024, 'x');
  AtomicFile file(folder.file("f"), AtomicFile::Way::kPastCache);
  file.write("begin", 5);
  file.overwrite(1, "EGI", 3);
  file.write(content.data(), content.size());
  file.commit();
  EXPECT_TRUE(read_file(folder.file("f")) == "bEGIn" + content);
}

TEST(File, errors_name_the_path) {
  for (const auto& action : {+[] { write_file("/no/such/folder", ""); }, +[] { read_file("/no/such/folder"); }}) try {
      action();
      FAIL() << "no error";
    } catch (const SystemError& error) {
      EXPECT_NE(std::string(error.what()).find("/no/such/folder"), std::string::npos) << error.what();
    }
}

TEST(File, a_folder_is_not_a_file) { EXPECT_THROW(read_file("/tmp"), SystemError); }

}  // namespace
}  // namespace lockstep
