// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/to_size.h"
#include "lockstep/data/formats/readers.h"
#include "lockstep/data/packed/packed_records.h"

#include <algorithm>
#include <numeric>
#include <random>

#include "lockstep/images.h"
#include "lockstep/loader.h"
#include "tests/data/files.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::message_of;
using testing::TempFolder;
using testing::write_image_folder;

std::vector<std::int64_t> all_of(const Dataset& dataset) {
  std::vector<std::int64_t> indices(to_size(dataset.size()));
  std::iota(indices.begin(), indices.end(), 0);
  return indices;
}

TEST(Packed, gives_back_the_same_images) {
  const TempFolder folder;
  const ImageDataset original(synthetic_images(57, {3, 5, 7}, 4), {});
  pack(original, folder / "p", {.shard_bytes = 2000, .keep_order = true});
  EXPECT_GT(RecordReader(folder / "p").shard_sizes().size(), 3U);
  const auto packed = open_packed(folder / "p", {});
  ASSERT_EQ(packed->size(), 57);
  EXPECT_EQ(packed->name(), "synthetic");
  const Batch a = packed->make_batch(all_of(*packed));
  const Batch b = original.make_batch(all_of(original));
  EXPECT_TRUE(torch::equal(a.data, b.data));
  EXPECT_TRUE(torch::equal(a.target, b.target));
}

TEST(Packed, keeps_encoded_images_as_files_or_shrinks_them) {
  const TempFolder folder;
  write_image_folder(folder / "images", 6);
  const auto source = std::make_shared<ImageFolder>(folder / "images");
  const ImageTransforms small{.height = 20, .width = 20};
  const ImageDataset original(source, small);
  pack(original, folder / "p", {.keep_order = true});
  const auto packed = open_packed(folder / "p", small);
  EXPECT_TRUE(torch::equal(packed->make_batch(all_of(*packed)).data, original.make_batch(all_of(original)).data));
  pack(original, folder / "q", {.keep_order = true, .shorter_edge = 30});
  const RecordReader shrunk(folder / "q");
  std::vector<std::uint8_t> scratch;
  EXPECT_EQ(shrunk.info().class_names, (std::vector<std::string>{"a", "b"}));
  for (std::int64_t i = 0; i < shrunk.size(); ++i) {
    const ImageShape shape = encoded_shape(shrunk.read(i, scratch).payload, "");
    EXPECT_EQ(std::min(shape.height, shape.width), 30);
  }
  const auto difference =
      open_packed(folder / "q", small)->make_batch(all_of(*packed)).data - original.make_batch(all_of(original)).data;
  EXPECT_LT(difference.abs().mean().item<float>(), 0.03);
}

TEST(Packed, keeps_the_dtype_of_tables) {
  const TempFolder folder;
  const TensorDataset original("table", torch::arange(30, torch::kInt16).reshape({10, 3}), torch::arange(10));
  pack(original, folder / "p", {.keep_order = true});
  EXPECT_EQ(first_good_record(RecordReader(folder / "p")).dtype, torch::kInt16);
  const auto packed = open_packed(folder / "p", {});
  EXPECT_TRUE(torch::equal(packed->make_batch(all_of(*packed)).data, torch::arange(30).reshape({10, 3})));
}

TEST(Packed, refuses_a_shard_that_becomes_shorter_while_it_is_in_use) {
  const TempFolder folder;
  const TensorDataset original("table", torch::arange(3000).reshape({1000, 3}), torch::arange(1000));
  pack(original, folder / "p", {.keep_order = true});
  const auto packed = open_packed(folder / "p", {});
  std::filesystem::resize_file(folder / "p/00000.lsr", 0);
  const std::string message = testing::message_of<DataError>([&] { packed->make_batch(all_of(*packed)); });
  EXPECT_TRUE(testing::contains(message, "00000.lsr: it became shorter while it was in use"));
}

TEST(Packed, visits_every_record_once_for_any_ranks_shuffled_within_windows) {
  const TempFolder folder;
  const TensorDataset original("numbers", torch::arange(500, torch::kInt32).reshape({500, 1}), torch::arange(500));
  pack(original, folder / "p", {.shard_bytes = 1500});
  for (const int ranks : {1, 3}) {
    std::mutex mutex;
    std::vector<std::int64_t> seen;
    run_ranks(ranks, [&](World& world) {
      const auto order = window_order(RecordReader(folder / "p").shard_sizes(), 64);
      Loader loader(world, open_packed(folder / "p", {}), {.batch_size = 20, .seed = 4, .workers = 2, .order = order});
      for (const Batch& batch : loader.epoch(2)) {
        EXPECT_TRUE(torch::equal(batch.data.squeeze(1), batch.target));
        const std::lock_guard lock(mutex);
        for (std::int64_t i = 0; i < batch.size(); ++i) seen.push_back(batch.target[i].item<std::int64_t>());
      }
    });
    std::sort(seen.begin(), seen.end());
    EXPECT_EQ(seen, all_of(original));
  }
}

class DamagedPack : public ::testing::Test {
 protected:
  DamagedPack() {
    const TensorDataset original("numbers", torch::arange(40, torch::kInt32).reshape({20, 2}), torch::arange(20));
    pack(original, folder / "p", {.keep_order = true});
    shard = read_file(path);
  }
  std::string refusal() {
    return message_of<DataError>([&] {
      const auto dataset = open_packed(folder / "p", {});
      dataset->make_batch(all_of(*dataset));
    });
  }
  TempFolder folder;
  std::filesystem::path path = folder / "p/00000.lsr";
  std::string shard;
};

TEST_F(DamagedPack, names_the_record_whose_bytes_changed) {
  std::string changed = shard;
  changed[16 + 3 * 32 + 20] ^= 1;  // records have 16 + 8 + 8 bytes
  write_file(path, changed);
  const std::string message = refusal();
  EXPECT_TRUE(contains(message, "record 3: its checksum does not match"));
  EXPECT_TRUE(contains(message, path.string()));
}

TEST_F(DamagedPack, refuses_a_shard_cut_at_any_byte) {
  for (std::size_t length = 0; length < shard.size(); length += 5) {
    write_file(path, shard.substr(0, length));
    EXPECT_TRUE(contains(refusal(), std::to_string(length) + " found"));
  }
}

TEST_F(DamagedPack, refuses_a_damaged_index_and_a_missing_shard) {
  std::string changed = shard;
  changed[shard.size() - 40] ^= 1;
  write_file(path, changed);
  EXPECT_TRUE(contains(refusal(), "the checksum of its index does not match"));
  std::filesystem::remove(path);
  EXPECT_TRUE(contains(refusal(), "No such file"));
  std::filesystem::remove(folder / "p/packed.json");
  EXPECT_TRUE(contains(refusal(), "no packed data in"));
}

TEST_F(DamagedPack, is_never_overwritten) {
  const TensorDataset other("other", torch::zeros({1, 1}), torch::zeros({1}, torch::kInt64));
  EXPECT_TRUE(contains(message_of<UsageError>([&] { pack(other, folder / "p"); }), "holds packed data already"));
  const TensorDataset floats("floats", torch::zeros({1, 1}), torch::zeros({1}));
  EXPECT_TRUE(
      contains(message_of<UsageError>([&] { pack(floats, folder / "f"); }), "targets other than one whole number per sample"));
}

}  // namespace
}  // namespace lockstep
