// SPDX-License-Identifier: Apache-2.0
#include "lockstep/datasets.h"

#include <zlib.h>

#include <fstream>
#include <random>

#include "lockstep/base/files/file.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::message_of;
using testing::TempFolder;

// 2 x 3 values 1..6.
const std::string kGood{0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 6};

void write_gz(const std::filesystem::path& path, const std::string& content) {
  gzFile file = gzopen(path.c_str(), "wb");
  ASSERT_EQ(gzwrite(file, content.data(), static_cast<unsigned>(content.size())), static_cast<int>(content.size()));
  ASSERT_EQ(gzclose(file), Z_OK);
}

TEST(Idx, reads_plain_and_gzipped_files) {
  const TempFolder folder;
  write_file(folder / "plain", kGood);
  write_gz(folder / "packed.gz", kGood);
  const auto expected = torch::tensor({1, 2, 3, 4, 5, 6}, torch::kUInt8).reshape({2, 3});
  EXPECT_TRUE(torch::equal(read_idx(folder / "plain"), expected));
  EXPECT_TRUE(torch::equal(read_idx(folder / "packed.gz"), expected));
}

TEST(Idx, refuses_a_file_cut_at_any_byte_and_says_where) {
  const TempFolder folder;
  for (size_t length = 0; length < kGood.size(); ++length) {
    write_file(folder / "cut", kGood.substr(0, length));
    const std::string message = message_of<DataError>([&] { read_idx(folder / "cut"); });
    EXPECT_TRUE(contains(message, "truncated")) << length;
    EXPECT_TRUE(contains(message, (folder / "cut").string() + ", offset " + std::to_string(length)));
  }
}

TEST(Idx, refuses_a_gzipped_file_cut_at_any_byte) {
  const TempFolder folder;
  write_gz(folder / "whole.gz", kGood);
  const std::string whole = read_file(folder / "whole.gz");
  for (size_t length = 1; length < whole.size(); ++length) {
    write_file(folder / "cut.gz", whole.substr(0, length));
    EXPECT_THROW(read_idx(folder / "cut.gz"), DataError) << length << " of " << whole.size();
  }
}

TEST(Idx, names_the_error_in_a_header) {
  const TempFolder folder;
  const auto message_for = [&](size_t at, char value) {
    std::string bytes = kGood;
    bytes[at] = value;
    write_file(folder / "bad", bytes);
    return message_of<DataError>([&] { read_idx(folder / "bad"); });
  };
  for (const auto& [at, value] : std::initializer_list<std::pair<size_t, char>>{{0, 1}, {2, 13}, {3, 0}, {3, 9}})
    EXPECT_TRUE(contains(message_for(at, value), "no IDX file of unsigned bytes in 1 to 4")) << at;
  EXPECT_TRUE(contains(message_for(7, 1), "goes on after its last value"));
  EXPECT_TRUE(contains(message_for(7, 3), "9 values promised, 6 found"));
  EXPECT_TRUE(contains(message_for(4, 127), "values promised, 6 found"));  // 6 GB promised: none is allocated
}

TEST(Idx, unpacks_no_more_than_its_limit) {
  const TempFolder folder;
  write_gz(folder / "bomb.gz", std::string("\0\0\x08\x01\0\x10\0\0", 8) + std::string(1 << 20, '\0'));
  EXPECT_EQ(read_idx(folder / "bomb.gz", 1 << 20).numel(), 1 << 20);
  const std::string message = message_of<DataError>([&] { read_idx(folder / "bomb.gz", (1 << 20) - 1); });
  EXPECT_TRUE(contains(message, "unpacks to more than the limit"));
}

TEST(Idx, names_a_missing_file) {
  EXPECT_TRUE(contains(message_of<DataError>([] { read_idx("/no/such/file"); }), "can't open /no/such/file"));
}

// Random changes to a real file: an error or a tensor, never a crash. Longer rounds run in `make soak`.
TEST(Idx, survives_mutated_files) {
  const TempFolder folder;
  write_gz(folder / "whole.gz", kGood);
  std::mt19937 random(1);
  for (const std::string& original : {kGood, read_file(folder / "whole.gz")}) {
    for (int round = 0; round < testing::rounds("LOCKSTEP_FUZZ_ROUNDS", 300); ++round) {
      std::string bytes = original;
      for (int change = 0; change < 3; ++change) bytes[random() % bytes.size()] = static_cast<char>(random());
      std::filesystem::remove(folder / "mutated");  // a file that is written over is flushed to the disk
      std::ofstream(folder / "mutated", std::ios::binary) << bytes;
      try {
        EXPECT_LE(read_idx(folder / "mutated").numel(), 6);
      } catch (const DataError&) {
      }
    }
  }
}

class FashionMNISTFiles : public ::testing::Test {
 protected:
  void write_images(int count) {
    std::string bytes{0, 0, 8, 3, 0, 0, 0, static_cast<char>(count), 0, 0, 0, 28, 0, 0, 0, 28};
    for (int i = 0; i < count; ++i) bytes += std::string(784, static_cast<char>(i));
    write_file(folder / "train-images-idx3-ubyte", bytes);
  }
  void write_labels(const std::string& labels) {
    write_file(folder / "train-labels-idx1-ubyte",
               std::string{0, 0, 8, 1, 0, 0, 0, static_cast<char>(labels.size())} + labels);
  }
  std::string refusal() {
    return message_of<DataError>([&] { FashionMNIST(folder.path()); });
  }
  TempFolder folder;
};

TEST_F(FashionMNISTFiles, refuses_counts_that_disagree) {
  write_images(3);
  write_labels({1, 2});
  EXPECT_TRUE(contains(refusal(), "3 images, but labels of shape [2]"));
}

TEST_F(FashionMNISTFiles, refuses_a_label_out_of_range_and_names_the_sample) {
  write_images(3);
  write_labels({1, 9, 10});
  const std::string message = refusal();
  EXPECT_TRUE(contains(message, "label 10 of sample 2"));
  EXPECT_TRUE(contains(message, "train-labels-idx1-ubyte, sample 2"));
}

TEST_F(FashionMNISTFiles, refuses_labels_where_images_belong) {
  write_labels({1, 2});
  std::filesystem::copy(folder / "train-labels-idx1-ubyte", folder / "train-images-idx3-ubyte");
  EXPECT_TRUE(contains(refusal(), "not (N, 28, 28)"));
}

TEST_F(FashionMNISTFiles, gives_the_requested_samples_in_order) {
  write_images(4);
  write_labels({4, 5, 6, 7});
  const FashionMNIST data(folder.path());
  const std::vector<int64_t> indices = {3, 0, 3};
  const Batch batch = data.make_batch(indices);
  EXPECT_TRUE(torch::equal(batch.target, torch::tensor({7, 4, 7}, torch::kInt64)));
  EXPECT_EQ(batch.data.sizes(), (std::vector<int64_t>{3, 1, 28, 28}));
  EXPECT_FLOAT_EQ(batch.data[0][0][13][5].item<float>(), (3.0F / 255 - 0.2860F) / 0.3530F);
  EXPECT_FLOAT_EQ(batch.data[1][0][0][0].item<float>(), (0.0F / 255 - 0.2860F) / 0.3530F);
  EXPECT_EQ(data.make_batch({}).size(), 0);
}

TEST(FashionMNIST, has_sixty_and_ten_thousand_normalised_images) {
  const FashionMNIST train;
  EXPECT_EQ(train.size(), 60000);
  EXPECT_EQ(FashionMNIST(FashionMNIST::kDebianFolder, Split::kValidation).size(), 10000);
  std::vector<int64_t> all(60000);
  std::iota(all.begin(), all.end(), 0);
  const Batch batch = train.make_batch(all);
  EXPECT_NEAR(batch.data.mean().item<double>(), 0, 2e-4);
  EXPECT_NEAR(batch.data.std().item<double>(), 1, 2e-4);
  for (int label = 0; label < 10; ++label) EXPECT_EQ(batch.target.eq(label).sum().item<int>(), 6000);
}

}  // namespace
}  // namespace lockstep
